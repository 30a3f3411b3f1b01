package sessiondtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// A group of its own keeps a terminal's Ctrl-C from the child: who started it decides when it stops. Should that
// process be killed, the kernel kills the child.
func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// stopped tells whether all threads of a process are stopped by a signal.
func stopped(pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(threads) == 0 {
		return false
	}
	for _, t := range threads {
		// The state stands after the name, which is in parentheses and may have any character in it.
		stat, err := os.ReadFile(t)
		if err != nil {
			return false
		}
		if i := strings.LastIndex(string(stat), ") "); i < 0 || !strings.HasPrefix(string(stat[i:]), ") T ") {
			return false
		}
	}
	return true
}
