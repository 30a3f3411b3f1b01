// Package chaos proves what sessiond promises while everything around it breaks: clients work on sessions, locks and messages
// of a cluster of real processes, faults are made from a seed, what every client saw is recorded, and models judge it.
//
// A test of one fault shows what its author thought of. Here nobody has to: whatever happens, the recorded history of each session
// must be one that a single, unbroken session could have had. That is a question about orders, which porcupine answers; what it
// cannot tell, because it knows no queue and no end of a wait, is checked on the same history by rules of their own.
//
//   - history.go: what clients did and saw;
//   - model.go: the session, its lock and its fencing tokens, for porcupine;
//   - checks.go: rules on fences, chains of values, waits and ends of locks;
//   - messages.go: exactly once, in order, across reconnects;
//   - workload.go: what clients do;
//   - cluster.go, faults.go: processes, the links between them, and how they break;
//   - frontend.go: MCP clients of front-ends on the same cluster;
//   - leftovers.go: what must be gone when the traffic has stopped;
//   - run.go: all of it together.
//
// The checkers are themselves tested by histories written by hand, and by faults planted into stores (planted_test.go), each of which
// must be caught. README.md says how to run and repeat it, and what it does not prove.
package chaos
