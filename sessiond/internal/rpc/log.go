package rpc

import (
	"context"
	"log/slog"
	"time"

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
		// The library keeps fields that are there, so these stand in for its own.
		fields := append(logging.Fields{"grpc.start_time", began.Format(time.RFC3339)}, logging.DefaultDurationToFields(time.Since(began))...)
		ctx = logging.InjectFields(ctx, fields)
		return library(ctx, req, info, func(context.Context, any) (any, error) { return resp, err })
	}
}
