//go:build unix && !linux

package sessiondtest

import "syscall"

func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}

func stopped(int) bool { return true }
