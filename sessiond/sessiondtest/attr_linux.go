package sessiondtest

import "syscall"

// A group of its own keeps a terminal's Ctrl-C from the child: who started it decides when it stops. Should that
// process be killed, the kernel kills the child.
func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
