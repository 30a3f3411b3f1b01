// Package etcdnode connects a node to etcd: to a member that it embeds, or to the members of a cluster.
//
// An embedded member is a cluster of one. It listens for clients on a unix socket in its data folder and for peers not at
// all, so that any number of them run on one machine without a port to choose. Transactions are calls within the
// process, and watches are the member's own. Leases go through the socket. Nothing uses etcd's in-process client, whose watch
// adapter can deadlock when watches are cancelled.
//
// Its settings, where they are not etcd's own defaults:
//
//   - Quota 8 GiB (etcd: 2), the most that etcd recommends. The file holds what is stored, a minute of history, and free space.
//   - History is compacted every minute to the last minute (etcd: never). Nothing reads history; a watch that falls behind
//     reads anew.
//   - Free space is given back to the disk at a start, if that is at least 512 MiB; if the quota had been used up
//     (alarm NOSPACE) and there is room again, the alarm is disarmed. etcd reuses free space by itself, so this matters after
//     a time of unusual growth only.
//   - Requests of up to the largest session, or 1 MiB, and 512 KiB (etcd: 1.5 MiB), with 512 operations (etcd: 128).
//   - A snapshot of its log every 1,000 commits (etcd: 10,000), of which it keeps 100 in memory (etcd: 5,000) and two files of 64 MiB
//     on disk (etcd: 5) or more, from the last snapshot on. One commit has what many callers write, or a session of the largest
//     size, and a start reads and replays all since the last snapshot. Etcd's numbers are there for members that fall behind.
//   - It elects itself at once when it starts (etcd: after up to an election timeout, in case another member leads).
//   - Every commit is synced to disk (etcd's default, never switched off). Election timeouts and the rest are etcd's.
//   - Its log goes to the node's at warn level, without what names sessions.
//
// An external cluster has the settings that its operators gave it. Inspect looks after both, as far as etcd's API tells.
package etcdnode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

const (
	quotaBytes = 8 << 30
	// History that an embedded member keeps. Nothing reads history: a watch that falls behind reads anew.
	compactAfter = "1m"
	// What a request may carry beside a session's or message chunk's bytes, and what it does in the usual case.
	requestOverhead = 512 << 10
	valueOverhead   = 4 << 10
	// Commits from one snapshot of the log to the next, those kept in memory after one, and files of the log.
	snapshotEvery, keptInMemory, logFiles = 1000, 100, 2
	// Free space that is worth giving back at a start, in MiB.
	defragAtStart = 512
	// How often an embedded member that starts is told to stand for election.
	standEvery = 5 * time.Millisecond
	// What may be on its way to the client unread, on one stream and on all of them.
	streamWindow, connWindow = 1 << 20, 4 << 20
	// The longest path that fits a unix socket's address everywhere (104 bytes on some systems, with the final zero).
	maxSocketPath = 100
)

// ErrDataDirInUse says that another process runs on the data folder.
var ErrDataDirInUse = errors.New("data folder is in use by another process")

// Node is a connection to etcd, with the embedded member if there is one. Its methods may be called concurrently.
type Node struct {
	client    *clientv3.Client
	asks      []*clientv3.Client
	stop      context.CancelFunc // of what asks the members; nil with a single one
	wg        sync.WaitGroup
	sendBytes int // limit of the client's requests

	inspector   *inspector
	stopInspect context.CancelFunc

	kv        *KV
	member    *embed.Etcd
	lock      *fileutil.LockedFile
	socketDir string
	endpoints []string
	watcher   *Watcher
	closing   atomic.Bool // etcd reports its own end as a row of errors
}

// EmbedConfig describes an embedded member.
type EmbedConfig struct {
	// DataDir is the data folder; made if missing.
	DataDir string
	// MaxValueBytes is the largest value that has to fit into one request.
	MaxValueBytes int
	// QuotaBytes is the size at which the member takes no more writes; 0 stands for 8 GiB.
	QuotaBytes int64
	// Logger takes what etcd has to say at warn level and above.
	Logger *slog.Logger

	electionTimeout time.Duration // for tests; 0 stands for etcd's default
}

// ConnectConfig describes a connection to a cluster.
type ConnectConfig struct {
	// Endpoints are the members' addresses.
	Endpoints []string
	// MaxValueBytes is the largest value that has to fit into one request.
	MaxValueBytes int
	// Logger takes what the client has to say at error level, and which members answer.
	Logger *slog.Logger
}

func requestBytes(maxValueBytes int) int { return max(maxValueBytes, 1<<20) + requestOverhead }

// Embed starts an etcd member in this process and connects to it. It returns when the member serves, with
// ErrDataDirInUse if another process runs on the data folder, or when ctx ends.
func Embed(ctx context.Context, cfg EmbedConfig) (_ *Node, err error) {
	n := &Node{sendBytes: requestBytes(cfg.MaxValueBytes)}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	if cfg.QuotaBytes == 0 {
		cfg.QuotaBytes = quotaBytes
	}

	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	// etcd itself would wait for the other process's database lock, silently and for ever.
	lockPath := filepath.Join(cfg.DataDir, "sessiond.lock")
	n.lock, err = fileutil.TryLockFile(lockPath, os.O_WRONLY|os.O_CREATE, 0o600)
	if errors.Is(err, fileutil.ErrLocked) {
		return nil, fmt.Errorf("%w: %s", ErrDataDirInUse, cfg.DataDir)
	} else if err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}

	socket, err := n.makeSocketPath(cfg.DataDir)
	if err != nil {
		return nil, err
	}

	ec := embed.NewConfig()
	ec.Name = "sessiond"
	ec.Dir = filepath.Join(cfg.DataDir, "etcd")
	ec.InitialCluster = ec.InitialClusterFromName(ec.Name)
	ec.ListenPeerUrls = nil
	ec.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	ec.QuotaBackendBytes = cfg.QuotaBytes
	ec.BootstrapDefragThresholdMegabytes = uint(max(min(defragAtStart, cfg.QuotaBytes>>24), 1))
	ec.MaxRequestBytes = uint(requestBytes(cfg.MaxValueBytes))
	ec.MaxTxnOps = 512
	ec.SnapshotCount, ec.SnapshotCatchUpEntries, ec.MaxWalFiles = snapshotEvery, keptInMemory, logFiles
	ec.AutoCompactionMode = embed.CompactorModePeriodic
	ec.AutoCompactionRetention = compactAfter
	ec.GRPCKeepAliveMinTime = time.Second
	if cfg.electionTimeout != 0 {
		ec.ElectionMs = uint(cfg.electionTimeout.Milliseconds())
	}
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(newZap(cfg.Logger, &n.closing, zap.WarnLevel))

	n.member, err = embed.StartEtcd(ec)
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	if err := n.awaitReady(ctx); err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}

	if err := n.connect([]string{"unix://" + socket}, cfg.Logger); err != nil {
		return nil, err
	}
	n.kv = newInProcessKV(n.member.Server)
	n.watcher = newWatcher(n.client, n.member.Server.Watchable())
	if err := n.disarm(ctx, cfg); err != nil {
		return nil, err
	}
	return n, nil
}

// awaitReady waits until the embedded member serves.
//
// A member that starts waits for up to an election timeout before it stands for election, in case another one leads. This one is
// alone, so it is told to stand at once, with the message by which a leader hands over. Raft takes no notice of that message while
// the member still has to apply that it joined (at its first start), while it stands, and once it leads; so it is repeated.
func (n *Node) awaitReady(ctx context.Context) error {
	server := n.member.Server
	id := uint64(server.MemberID())
	stand := &raftpb.Message{Type: raftpb.MsgTimeoutNow.Enum(), From: &id, To: &id}
	tick := time.NewTicker(standEvery)
	defer tick.Stop()
	for first := true; ; {
		select {
		case <-server.ReadyNotify():
			return nil
		case <-server.StopNotify():
			return errors.New("the member stopped")
		case err := <-n.member.Err():
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if server.AppliedIndex() == 0 || uint64(server.Leader()) != raft.None {
			continue
		}
		if first {
			// A leader looks into its database for what the first start has only just written, and logs an error if it is not there yet.
			server.Backend().ForceCommit()
			first = false
		}
		if err := server.Process(ctx, stand); err != nil && ctx.Err() == nil {
			return fmt.Errorf("stand for election: %w", err)
		}
	}
}

// disarm ends the alarm that an embedded member had raised when its quota was used up, if there is room again.
func (n *Node) disarm(ctx context.Context, cfg EmbedConfig) error {
	backend := n.member.Server.Backend()
	if backend.Size() >= cfg.QuotaBytes/100*warnPercent {
		return nil
	}
	for _, alarm := range n.member.Server.Alarms() {
		if alarm.Alarm != etcdserverpb.AlarmType_NOSPACE {
			continue
		}
		if _, err := n.client.AlarmDisarm(ctx, (*clientv3.AlarmMember)(alarm)); err != nil {
			return fmt.Errorf("start etcd: disarm the alarm of its space quota: %w", err)
		}
		if cfg.Logger != nil {
			cfg.Logger.WarnContext(ctx, "etcd's space quota had been used up; there is room again, so it takes writes",
				"size_bytes", backend.Size(), "quota_bytes", cfg.QuotaBytes)
		}
	}
	return nil
}

// Connect makes a client of a cluster. It does not wait for the cluster: while no member can be reached, calls fail.
func Connect(cfg ConnectConfig) (*Node, error) {
	n := &Node{sendBytes: requestBytes(cfg.MaxValueBytes)}
	if err := n.connect(cfg.Endpoints, cfg.Logger); err != nil {
		return nil, err
	}
	return n, nil
}

func (n *Node) connect(endpoints []string, logger *slog.Logger) error {
	client, err := n.newClient(endpoints, logger)
	if err != nil {
		return err
	}
	n.client = client
	n.kv = newRemoteKV(client, n.sendBytes+requestOverhead)
	n.watcher = newWatcher(client, nil)
	n.endpoints = endpoints
	if len(endpoints) == 1 {
		return nil
	}
	for _, endpoint := range endpoints {
		ask, err := n.newClient([]string{endpoint}, logger)
		if err != nil {
			return errors.Join(err, n.Close())
		}
		n.asks = append(n.asks, ask)
	}
	m := &members{client: client, endpoints: endpoints, asks: n.asks, logger: logger, used: endpoints}
	ctx, cancel := context.WithCancel(context.Background())
	n.stop = cancel
	n.wg.Go(func() { m.run(ctx) })
	return nil
}

func (n *Node) newClient(endpoints []string, logger *slog.Logger) (*clientv3.Client, error) {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		DialKeepAliveTime:    5 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		PermitWithoutStream:  true,
		MaxCallSendMsgSize:   n.sendBytes + requestOverhead,
		// It warns of every call that fails; the one who calls does that.
		Logger: newZap(logger, &n.closing, zap.ErrorLevel),
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: 2 * time.Second,
			}),
			// Fixed windows spare the ping after each answer by which gRPC would find out.
			grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("etcd client: %w", err)
	}
	return client, nil
}

// socketPath is a path that etcd can listen on and its client can dial: short enough for a socket's address, and the same
// as the path of a URL, into which both put it unescaped.
func socketPath(dir string) (string, bool) {
	path := filepath.Join(dir, "etcd.sock")
	return path, len(path) <= maxSocketPath && (&url.URL{Path: path}).EscapedPath() == path
}

// makeSocketPath names a socket in the data folder, or in a new folder if the data folder's path cannot hold one.
func (n *Node) makeSocketPath(dataDir string) (string, error) {
	abs, err := filepath.Abs(dataDir)
	if err != nil {
		return "", fmt.Errorf("data folder: %w", err)
	}
	if path, ok := socketPath(abs); ok {
		return path, nil
	}
	for _, base := range []string{os.TempDir(), "/tmp"} {
		dir, err := os.MkdirTemp(base, "sessiond-")
		if err != nil {
			return "", fmt.Errorf("socket folder: %w", err)
		}
		n.socketDir = dir
		if path, ok := socketPath(dir); ok {
			return path, nil
		}
		if err := os.RemoveAll(dir); err != nil {
			return "", fmt.Errorf("socket folder: %w", err)
		}
	}
	return "", errors.New("socket folder: no path for a unix socket; is TMPDIR too long?")
}

// Client is the client for everything but transactions and watches.
func (n *Node) Client() *clientv3.Client { return n.client }

// KV is for reads and transactions.
func (n *Node) KV() *KV { return n.kv }

// Watcher is for watches. Those have to be ended before Close.
func (n *Node) Watcher() *Watcher { return n.watcher }

// Endpoints are the addresses that the client uses; those of an embedded member serve other nodes of this machine too.
func (n *Node) Endpoints() []string { return n.endpoints }

// Member is the embedded member, or nil.
func (n *Node) Member() *embed.Etcd { return n.member }

// Failed is closed when the embedded member has stopped. It is nil without one.
func (n *Node) Failed() <-chan struct{} {
	if n.member == nil {
		return nil
	}
	return n.member.Server.StopNotify()
}

// Close closes the connection and stops the embedded member.
func (n *Node) Close() error {
	n.closing.Store(true)
	if n.stop != nil {
		n.stop()
	}
	if n.stopInspect != nil {
		n.stopInspect()
	}
	n.wg.Wait()
	if n.watcher != nil {
		n.watcher.close()
	}
	var errs []error
	for _, client := range append(n.asks, n.client) {
		if client == nil {
			continue
		}
		if err := client.Close(); err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	if n.member != nil {
		n.member.Close()
	}
	if n.lock != nil {
		errs = append(errs, n.lock.Close())
	}
	if n.socketDir != "" {
		errs = append(errs, os.RemoveAll(n.socketDir))
	}
	return errors.Join(errs...)
}

// CheckEndpoint says whether an endpoint's form is one that the client understands.
func CheckEndpoint(endpoint string) error {
	rest := endpoint
	if u, err := url.Parse(endpoint); err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https") {
		rest = u.Host
	} else if err == nil && u.Scheme == "unix" && u.Path != "" {
		return nil
	}
	host, port, err := net.SplitHostPort(rest)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil || host == "" {
		return fmt.Errorf("%q is not host:port, http(s)://host:port or unix:///path", endpoint)
	}
	return nil
}
