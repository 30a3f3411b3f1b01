package rpc

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What is logged of a call, and whether it is, does not depend on when the library's interceptor is run.
func TestLogs(t *testing.T) {
	for _, tt := range []struct {
		level slog.Level
		code  codes.Code
		want  string // the level that is logged; empty: nothing is
	}{
		{slog.LevelDebug, codes.OK, "DEBUG"},
		{slog.LevelInfo, codes.OK, ""},
		{slog.LevelInfo, codes.NotFound, ""},
		{slog.LevelInfo, codes.ResourceExhausted, "INFO"},
		{slog.LevelWarn, codes.ResourceExhausted, ""},
		{slog.LevelWarn, codes.Internal, "ERROR"},
	} {
		var out strings.Builder
		logger := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: tt.level}))
		logs := logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
			logger.Log(ctx, slog.Level(level), msg, fields...) //nolint:sloglint // as in the server
		})
		options := []logging.Option{logging.WithLogOnEvents(logging.FinishCall), logging.WithLevels(logLevel)}
		intercept := unaryLog(logger, logging.UnaryServerInterceptor(logs, options...))
		calls := 0
		info := &grpc.UnaryServerInfo{FullMethod: "/sessiond.v1.SessionService/Read"}
		resp, err := intercept(t.Context(), "request", info, func(context.Context, any) (any, error) {
			calls++
			return "response", status.Error(tt.code, "text")
		})
		if calls != 1 || status.Code(err) != tt.code || resp != "response" {
			t.Errorf("%v, %v: %d calls, %v, %v", tt.level, tt.code, calls, resp, err)
		}
		wantLog(t, tt.level, tt.code, tt.want, "Read", out.String())

		out.Reset()
		streaming := streamLog(logger, logging.StreamServerInterceptor(logs, options...))
		streamInfo := &grpc.StreamServerInfo{FullMethod: "/sessiond.v1.MessageService/Subscribe", IsServerStream: true}
		err = streaming("service", &streamedCall{ctx: t.Context()}, streamInfo, func(any, grpc.ServerStream) error {
			calls++
			return status.Error(tt.code, "text")
		})
		if calls != 2 || status.Code(err) != tt.code {
			t.Errorf("%v, %v: %d calls, %v", tt.level, tt.code, calls, err)
		}
		wantLog(t, tt.level, tt.code, tt.want, "Subscribe", out.String())
	}
}

func wantLog(t *testing.T, level slog.Level, code codes.Code, want, method, line string) {
	t.Helper()
	if want == "" {
		if line != "" {
			t.Errorf("%v, %v: logged %s", level, code, line)
		}
		return
	}
	for _, part := range []string{"level=" + want, "grpc.code=" + code.String(), "grpc.method=" + method, "grpc.start_time=", "grpc.time_ms="} {
		if strings.Count(line, part) != 1 {
			t.Errorf("%v, %v: %s is not in %s", level, code, part, line)
		}
	}
}
