package etcdnode

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newZap makes a logger for etcd that hands what is of a level and above to ours, until quiet is set.
func newZap(logger *slog.Logger, quiet *atomic.Bool, level zapcore.Level) *zap.Logger {
	if logger == nil {
		return zap.NewNop()
	}
	return zap.New(&bridge{logger: logger.With("component", "etcd"), quiet: quiet, level: level})
}

// moot are warnings about choices that are right for a member that only this process talks to.
var moot = []string{
	"Running http and grpc server on single port. This is not recommended for production.",
	"simple token is not cryptographically signed",
}

// secret are fields that can have the ids of sessions in them.
var secret = []string{"request", "response", "key", "range-begin", "range-end", "range_begin", "range_end"}

type bridge struct {
	logger *slog.Logger
	quiet  *atomic.Bool
	level  zapcore.Level
	fields []zapcore.Field
}

func (b *bridge) Enabled(level zapcore.Level) bool {
	return level >= b.level && !b.quiet.Load()
}

func (b *bridge) With(fields []zapcore.Field) zapcore.Core {
	return &bridge{logger: b.logger, quiet: b.quiet, level: b.level, fields: slices.Concat(b.fields, fields)}
}

func (b *bridge) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if b.Enabled(entry.Level) && !slices.Contains(moot, entry.Message) {
		return checked.AddCore(entry, b)
	}
	return checked
}

func (b *bridge) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range b.fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		f.AddTo(enc)
	}
	attrs := make([]slog.Attr, 0, len(enc.Fields))
	for k, v := range enc.Fields {
		if !slices.Contains(secret, k) {
			attrs = append(attrs, slog.Any(k, v))
		}
	}
	level := slog.LevelWarn
	if entry.Level >= zapcore.ErrorLevel {
		level = slog.LevelError
	}
	b.logger.LogAttrs(context.Background(), level, entry.Message, attrs...) //nolint:sloglint // the text is etcd's, and constant
	return nil
}

func (b *bridge) Sync() error { return nil }
