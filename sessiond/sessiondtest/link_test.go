package sessiondtest

import (
	"io"
	"net"
	"testing"
	"time"
)

// echoServer answers each connection with what it gets.
func echoServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l.Addr().String()
}

func say(t *testing.T, c net.Conn, wait time.Duration) error {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

func TestLink(t *testing.T) {
	k := StartLink(t, echoServer(t))
	open := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", k.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	c := open()
	if err := say(t, c, 10*time.Second); err != nil {
		t.Fatalf("through the link: %v", err)
	}
	k.Freeze()
	if err := say(t, c, 50*time.Millisecond); err == nil {
		t.Error("something came through a frozen link")
	}
	k.Thaw()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
		t.Errorf("what was held back: %v", err)
	}
	k.Cut()
	if err := say(t, c, 10*time.Second); err == nil {
		t.Error("something came through a cut link")
	}
	if c, err := net.Dial("tcp", k.Addr()); err == nil {
		_ = c.Close()
		t.Error("a cut link takes connections")
	}
	if err := k.Restore(); err != nil {
		t.Fatal(err)
	}
	if err := say(t, open(), 10*time.Second); err != nil {
		t.Errorf("through the restored link: %v", err)
	}
}

// What is asked gets through although the answer does not, and a delay holds both back.
func TestLinkOneWay(t *testing.T) {
	asked := make(chan string, 1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			buf := make([]byte, 5)
			if _, err := io.ReadFull(c, buf); err == nil {
				asked <- string(buf)
				_, _ = c.Write(buf)
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	k := StartLink(t, l.Addr().String())
	open := func() net.Conn {
		c, err := net.Dial("tcp", k.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	k.FreezeAnswers()
	if err := say(t, open(), 50*time.Millisecond); err == nil {
		t.Error("an answer came through")
	}
	if got := <-asked; got != "hello" {
		t.Errorf("asked %q", got)
	}
	k.Thaw()
	const delay = 30 * time.Millisecond
	k.Delay(delay)
	c := open()
	began := time.Now()
	if err := say(t, c, 10*time.Second); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < 2*delay {
		t.Errorf("there and back in %v, with a delay of %v each way", took, delay)
	}
	<-asked
}
