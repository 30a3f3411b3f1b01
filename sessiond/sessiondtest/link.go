package sessiondtest

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

// Link is a TCP connection between processes that a test can cut, freeze and slow down: it listens on a loopback port and passes
// on what comes to its target. Its methods may be called concurrently.
type Link struct {
	addr   string
	target string

	mu       sync.Mutex
	listener net.Listener // nil while cut
	conns    map[net.Conn]struct{}
	asks     flow // to the target
	answers  flow // from it
	running  sync.WaitGroup
}

// flow is one direction.
type flow struct {
	open  chan struct{} // closed while data flows
	delay time.Duration
}

func (f *flow) freeze() {
	select {
	case <-f.open:
		f.open = make(chan struct{})
	default:
	}
}

func (f *flow) thaw() {
	select {
	case <-f.open:
	default:
		close(f.open)
	}
}

// LaunchLink starts a link to a host:port. The caller closes it.
func LaunchLink(target string) (*Link, error) {
	addrs, err := FreeAddrs(1)
	if err != nil {
		return nil, err
	}
	k := &Link{
		addr: addrs[0], target: target, conns: map[net.Conn]struct{}{},
		asks: flow{open: make(chan struct{})}, answers: flow{open: make(chan struct{})},
	}
	k.thaw()
	if err := k.Restore(); err != nil {
		return nil, err
	}
	return k, nil
}

// StartLink starts a link to a host:port for a test, and closes it when the test ends.
func StartLink(t testing.TB, target string) *Link {
	t.Helper()
	k, err := LaunchLink(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	return k
}

// Addr is where the link listens, host:port: what is to be cut off is given this in place of the target.
func (k *Link) Addr() string { return k.addr }

// Cut breaks all connections, and refuses new ones until Restore: as if the target's machine rejected them.
func (k *Link) Cut() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.thaw()
	if k.listener != nil {
		_ = k.listener.Close()
		k.listener = nil
	}
	for c := range k.conns {
		_ = c.Close()
	}
	clear(k.conns)
}

// Freeze lets nothing through any more, without a word to either side, until Thaw or Cut: as if packets were dropped.
func (k *Link) Freeze() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asks.freeze()
	k.answers.freeze()
}

// FreezeAnswers lets nothing through from the target, until Thaw or Cut: what is asked for is done, and followed by Cut, nobody
// learns of it.
func (k *Link) FreezeAnswers() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.answers.freeze()
}

// Thaw lets through what was held back, and what comes.
func (k *Link) Thaw() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.thaw()
}

// Delay holds everything back for so long, each way; with 0 nothing any more. What is under way comes in order, and what comes
// meanwhile waits as well, as on a slow line.
func (k *Link) Delay(d time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asks.delay, k.answers.delay = d, d
}

// thaw is called with the lock held.
func (k *Link) thaw() {
	k.asks.thaw()
	k.answers.thaw()
}

// Restore takes connections again after Cut.
func (k *Link) Restore() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.listener != nil {
		return nil
	}
	l, err := net.Listen("tcp", k.addr)
	if err != nil {
		return fmt.Errorf("link: %w", err)
	}
	k.listener = l
	k.running.Go(func() { k.accept(l) })
	return nil
}

// Close ends the link and waits for what it started.
func (k *Link) Close() {
	k.Cut()
	k.running.Wait()
}

func (k *Link) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		k.running.Go(func() { k.connect(l, c) })
	}
}

func (k *Link) connect(l net.Listener, c net.Conn) {
	up, err := net.Dial("tcp", k.target)
	if err != nil {
		_ = c.Close()
		return
	}
	k.mu.Lock()
	if k.listener != l {
		// Cut while it was connecting.
		_, _ = c.Close(), up.Close()
		k.mu.Unlock()
		return
	}
	k.conns[c], k.conns[up] = struct{}{}, struct{}{}
	k.mu.Unlock()
	k.running.Go(func() { k.pass(up, c, &k.asks) })
	k.pass(c, up, &k.answers)
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.conns, c)
	delete(k.conns, up)
}

// pass copies one way until either side ends, and then ends both.
func (k *Link) pass(to, from net.Conn, way *flow) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		k.mu.Lock()
		open, delay := way.open, way.delay
		k.mu.Unlock()
		<-open
		if n > 0 && delay > 0 {
			<-time.After(delay)
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
