//go:build unix

package sessiondtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// Ports come in blocks, and the first port of a block stays open for as long as this process lives: that is how test
// binaries that run at the same time keep out of each other's way. All of them are below the range from which systems
// take the source ports of outgoing connections, so a port stays free while the process that had it is down.
const (
	firstPort = 10_000
	lastPort  = 32_000
	blockSize = 50
)

var ports struct {
	mu    sync.Mutex
	locks []net.Listener // one for each block, never closed
	next  int
	end   int
}

// FreeAddrs gives n addresses on 127.0.0.1 whose ports are free. It never gives an address twice.
func FreeAddrs(n int) ([]string, error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	var addrs []string
	for len(addrs) < n {
		if ports.next == ports.end {
			if err := lockBlock(); err != nil {
				return nil, err
			}
		}
		addr := fmt.Sprintf("127.0.0.1:%d", ports.next)
		ports.next++
		l, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return nil, err
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

func lockBlock() error {
	const blocks = (lastPort - firstPort) / blockSize
	var errs []error
	for range 50 {
		port := firstPort + blockSize*rand.IntN(blocks)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ports.locks = append(ports.locks, l)
		ports.next, ports.end = port+1, port+blockSize
		return nil
	}
	return fmt.Errorf("no block of free ports found: %w", errors.Join(errs...))
}
