package rpc

import (
	"context"
	"log/slog"
	"time"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"google.golang.org/grpc"
)

// unaryLog logs calls when they end. The library's interceptor gathers what it may have to log before each call, at the cost of
// a tenth of what an empty call takes. So unless calls that went well are logged too, it is run after the call and only
// for those that are logged.
func unaryLog(logger *slog.Logger, library grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if logger.Enabled(ctx, slog.LevelDebug) {
			return library(ctx, req, info, handler)
		}
		began := time.Now()
		resp, err := handler(ctx, req)
		if !logger.Enabled(ctx, slog.Level(errorLevel(err))) {
			return resp, err
		}
		return library(since(ctx, began), req, info, func(context.Context, any) (any, error) { return resp, err })
	}
}

// streamLog is unaryLog for calls that answer with a stream. What the library gathers would be kept as long as they last, and
// a node may have very many that hardly do anything.
func streamLog(logger *slog.Logger, library grpc.StreamServerInterceptor) grpc.StreamServerInterceptor {
	return func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := stream.Context()
		if logger.Enabled(ctx, slog.LevelDebug) {
			return library(service, stream, info, handler)
		}
		began := time.Now()
		err := handler(service, stream)
		if !logger.Enabled(ctx, slog.Level(errorLevel(err))) {
			return err
		}
		ended := &middleware.WrappedServerStream{ServerStream: stream, WrappedContext: since(ctx, began)}
		return library(service, ended, info, func(any, grpc.ServerStream) error { return err })
	}
}

// since says when a call began. The library keeps fields that are there, so these stand in for its own.
func since(ctx context.Context, began time.Time) context.Context {
	fields := append(logging.Fields{"grpc.start_time", began.Format(time.RFC3339)}, logging.DefaultDurationToFields(time.Since(began))...)
	return logging.InjectFields(ctx, fields)
}
