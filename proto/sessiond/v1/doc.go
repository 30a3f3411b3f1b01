// Package sessiondv1 is the generated Go code of the sessiond.v1 API: messages, clients and server interfaces of
// SessionService, LockService, MessageService and MultiplexService. The .proto files beside it say what each call does, costs and returns;
// package client wraps it for use.
package sessiondv1
