//go:build unix

package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
)

// machine is where it was measured, as far as it matters to somebody who compares.
type machine struct {
	Processor string
	Cores     int
	MemoryGiB float64
	System    string
	Versions  map[string]string
}

func (m machine) String() string {
	var versions []string
	for _, name := range []string{"go", "etcd", "grpc", "go-redis", "redsync"} {
		if v := m.Versions[name]; v != "" {
			versions = append(versions, name+" "+v)
		}
	}
	return fmt.Sprintf("%d × %s, %.0f GiB, %s; %s", m.Cores, m.Processor, m.MemoryGiB, m.System, strings.Join(versions, ", "))
}

func describeMachine() machine {
	m := machine{
		Processor: "processor", Cores: runtime.NumCPU(), System: runtime.GOOS + "/" + runtime.GOARCH,
		Versions: map[string]string{"go": strings.TrimPrefix(runtime.Version(), "go")},
	}
	if name := firstField("/proc/cpuinfo", "model name"); name != "" {
		m.Processor = name
	}
	if fs, err := procfs.NewDefaultFS(); err == nil {
		if mem, err := fs.Meminfo(); err == nil && mem.MemTotalBytes != nil {
			m.MemoryGiB = float64(*mem.MemTotalBytes) / (1 << 30)
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.System += " " + strings.TrimSpace(string(b))
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			for name, path := range map[string]string{
				"etcd": "go.etcd.io/etcd/server/v3", "grpc": "google.golang.org/grpc",
				"go-redis": "github.com/redis/go-redis/v9", "redsync": "github.com/go-redsync/redsync/v4",
			} {
				if dep.Path == path {
					m.Versions[name] = strings.TrimPrefix(dep.Version, "v")
				}
			}
		}
	}
	return m
}

// busy is the processor time of the whole machine that was not idle, and that of this process with its children which have ended.
func busy() (all, ours time.Duration) {
	if fs, err := procfs.NewDefaultFS(); err == nil {
		if stat, err := fs.Stat(); err == nil {
			c := stat.CPUTotal
			all = time.Duration((c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal) * float64(time.Second))
		}
	}
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var r syscall.Rusage
		if err := syscall.Getrusage(who, &r); err == nil {
			ours += time.Duration(r.Utime.Nano() + r.Stime.Nano())
		}
	}
	return all, ours
}

// firstField is the value of the first line "name : value" of a file.
func firstField(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		if k, v, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
