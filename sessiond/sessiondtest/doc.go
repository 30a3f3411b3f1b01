// Package sessiondtest starts and stops real etcd, sessiond and front-end processes on loopback, for tests and demos.
//
// What a cluster promises shows only when a process is killed, paused or cut off, and only real processes can be: a
// server inside the test's own process cannot die without the test. So all but [Start], a node inside the test's process for
// tests that need no more, is a child process with a port and a log file of its own, none of which outlives the process that
// started it. Faults are [Process.Kill], [Process.Pause] and, with a [Link] in between, a connection that is cut or frozen.
//
// Two layers: Launch... functions return errors and leave stopping to the caller. Start... functions take a
// [testing.TB], fail it, stop everything when it ends, and show the processes' output if it failed.
//
//	func TestFailover(t *testing.T) {
//		c := sessiondtest.StartCluster(t, sessiondtest.ClusterConfig{})
//		// ... talk to c.URL ...
//		c.FrontEnds[0].Kill()
//		// ... and go on talking ...
//	}
//
// The programs are taken from the folder that the environment variable E2E_BIN_DIR names, unless told otherwise. The
// package needs Unix signals; that a killed parent takes its children along needs Linux.
package sessiondtest
