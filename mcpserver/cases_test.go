package mcpserver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sessiond/sessiond/client"
	"github.com/sessiond/sessiond/mcpserver"
)

// What broke such servers in the field, beyond what the tests of each rule try already.

// F1 (C04, C97): a request that overtakes notifications/initialized, or meets a replica that has not seen it, is served.
func TestF1RequestBeforeInitialized(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		for range 20 {
			a := r.requestTo(0, http.MethodPost, "", initializeWith("2025-11-25", `{}`)).all()
			id := a.header.Get("Mcp-Session-Id")
			var both sync.WaitGroup
			for replica, body := range map[int]string{
				0: `{"jsonrpc":"2.0","method":"notifications/initialized"}`,
				1: `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`,
				2: `{"jsonrpc":"2.0","id":1,"method":"ping"}`,
			} {
				both.Go(func() {
					if a := r.requestTo(replica, http.MethodPost, id, body).all(); a.status >= 300 || strings.Contains(a.body, `"error"`) {
						t.Errorf("%s: %d %s", body, a.status, a.body)
					}
				})
			}
			both.Wait()
		}
	})
}

// F6, S9 (C11): a replica that cannot serve a session fails that request alone: the session is as it was, and served by others.
func TestF6FailureToRestoreHarmsNothing(t *testing.T) {
	r := newReplicas(t, 2, nil)
	id := r.open()
	before, err := r.store.Read(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	r.mcp[1].AddReceivingMiddleware(func(mcp.MethodHandler) mcp.MethodHandler {
		return func(context.Context, string, mcp.Request) (mcp.Result, error) {
			return nil, errors.New("this replica is broken")
		}
	})
	for range 3 {
		if a := r.requestTo(1, http.MethodPost, id, call("1", "echo", `{}`)).all(); !strings.Contains(a.body, `"error"`) || a.status == 404 {
			t.Errorf("the broken replica: %d %s", a.status, a.body)
		}
		if a := r.requestTo(0, http.MethodPost, id, call("1", "echo", `{"a":1}`)).all(); a.status != 200 || text(a.messages[0]) != `{"a":1}` {
			t.Errorf("the other one: %d %s", a.status, a.body)
		}
	}
	if after, err := r.store.Read(t.Context(), id); err != nil || string(after.Data) != string(before.Data) {
		t.Errorf("the record was %s, is %s, %v", before.Data, after.Data, err)
	}
	// A record of a version to come is a failing backend, not a session that is gone.
	later := strings.Replace(string(before.Data), `"format":1`, `"format":99`, 1)
	if _, err := r.store.Save(t.Context(), id, []byte(later), client.SaveOptions{TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
		if a := r.request(method, id, call("1", "echo", `{}`)).all(); a.status != 503 {
			t.Errorf("%s of a session of a later version: %d %s", method, a.status, a.body)
		}
	}
	if after, err := r.store.Read(t.Context(), id); err != nil || string(after.Data) != later {
		t.Errorf("the record was touched: %s, %v", after.Data, err)
	}
}

// F13, S5 (C20): whatever comes at the same time as a DELETE, the session stays gone.
func TestF13DeleteAgainstChanges(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		for range 50 {
			id := r.open()
			var all sync.WaitGroup
			for i, body := range []string{
				`{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"debug"}}`,
				`{"jsonrpc":"2.0","id":2,"method":"resources/subscribe","params":{"uri":"test://a"}}`,
				call("3", "add", `{"by":1}`),
				`{"jsonrpc":"2.0","method":"notifications/initialized"}`,
			} {
				all.Go(func() {
					if a := r.requestTo(i%3, http.MethodPost, id, body).all(); a.status >= 300 && a.status != 404 {
						t.Errorf("%s: %d %s", body, a.status, a.body)
					}
				})
			}
			if a := r.requestTo(0, http.MethodDelete, id, "").all(); a.status != 204 {
				t.Fatalf("DELETE: %d %s", a.status, a.body)
			}
			// From here on, also while those still run.
			for replica := range 3 {
				if a := r.requestTo(replica, http.MethodPost, id, call("1", "echo", `{}`)).all(); a.status != 404 {
					t.Errorf("after DELETE: %d %s", a.status, a.body)
				}
			}
			all.Wait()
			if _, err := r.store.Read(t.Context(), id); !errors.Is(err, client.ErrSessionNotFound) {
				t.Fatalf("the session is back: %v", err)
			}
		}
		if n := r.store.count(); n != 0 {
			t.Errorf("%d sessions are left", n)
		}
	})
}

// F1 (C25): a client that opens a session for each call and abandons it costs a replica nothing that stays.
func TestF1AbandonedSessionsLeaveNothing(t *testing.T) {
	r := newReplicas(t, 1, withLock)
	// Not the harness's own requests, which it keeps until the test ends.
	post := func(session, body string) (id string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.servers[0].URL, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if session != "" {
			req.Header.Set("Mcp-Session-Id", session)
		}
		resp, err := r.servers[0].Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", body, resp.Status, err)
		}
		return resp.Header.Get("Mcp-Session-Id")
	}
	abandon := func(n int) (goroutines int, heap uint64) {
		for range n {
			post(post("", initializeWith("2025-11-25", `{}`)), call("1", "add", `{"by":1}`))
		}
		for _, s := range r.servers {
			s.Client().CloseIdleConnections()
		}
		r.store.clear()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return runtime.NumGoroutine(), m.HeapAlloc
	}
	abandon(200)
	goroutines, heap := abandon(200)
	moreGoroutines, moreHeap := abandon(1000)
	// What a session left would be seen a thousand times over.
	if moreGoroutines > goroutines+100 || moreHeap > heap+1000*1024 {
		t.Errorf("after 1,000 more sessions: %d goroutines, were %d; %d bytes, were %d", moreGoroutines, goroutines, moreHeap, heap)
	}
}

// F19 (C34, C70): two requests in flight with one id and one progress token: what belongs to each comes on its own stream, in
// order, before the result, and nothing of it on the standalone stream.
func TestF19EqualTokensInFlight(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		tool := &mcp.Tool{Name: "steps"}
		for _, server := range r.mcp {
			mcp.AddTool(server, tool, func(ctx context.Context, req *mcp.CallToolRequest, in numberInput) (*mcp.CallToolResult, any, error) {
				for i := range 3 {
					if err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{
						ProgressToken: req.Params.GetProgressToken(), Progress: float64(i), Message: fmt.Sprint(in.By),
					}); err != nil {
						return nil, nil, err
					}
				}
				return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprint(in.By)}}}, nil, nil
			})
		}
		id := r.open()
		standalone := r.requestTo(2, http.MethodGet, id, "")
		var both sync.WaitGroup
		for i := range 2 {
			both.Go(func() {
				a := r.requestTo(i, http.MethodPost, id, fmt.Sprintf(
					`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"steps","arguments":{"by":%d},"_meta":{"progressToken":1}}}`, i)).all()
				if len(a.messages) != 4 || text(a.messages[3]) != fmt.Sprint(i) {
					t.Errorf("call %d: %d %s", i, a.status, a.body)
					return
				}
				for n, m := range a.messages[:3] {
					params, _ := m["params"].(map[string]any)
					if params["progress"] != float64(n) || params["message"] != fmt.Sprint(i) || params["progressToken"] != float64(1) {
						t.Errorf("call %d got %v as message %d", i, m, n)
					}
				}
			})
		}
		both.Wait()
		r.mark(id)
		// Adding the tool was a change of the list.
		for m := standalone.event(); m["method"] != "notifications/message"; m = standalone.event() {
			if m["method"] != "notifications/tools/list_changed" {
				t.Fatalf("on the standalone stream: %v", m)
			}
		}
		standalone.cut()
	})
}

// F3, F12 (C37): fifty subscriptions at the same time through all replicas are all kept, and so are the answers to three
// lists that a client asks for at once.
func TestF12SubscriptionsAtTheSameTime(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() { r.subscribe(i%3, id, "subscribe", fmt.Sprintf("test://%02d", i)) })
		}
		for i, method := range []string{"tools/list", "prompts/list", "resources/list"} {
			all.Go(func() {
				a := r.requestTo(i, http.MethodPost, id, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":%q}`, i, method)).all()
				if a.status != 200 || len(a.messages) != 1 || a.messages[0]["id"] != float64(i) {
					t.Errorf("%s: %d %s", method, a.status, a.body)
				}
			})
		}
		all.Wait()
		stored, err := r.store.Read(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(stored.Data), `"subscription/test://`); n != 50 {
			t.Errorf("%d of 50 subscriptions are stored", n)
		}
	})
}

// F12, F15 (C78): a resource that the client's very next request changes, on a replica that may not have heard of the
// subscription yet, is told.
func TestF12SubscriptionHoldsAtOnce(t *testing.T) {
	for range 50 {
		r := newReplicas(t, 3, nil)
		for _, server := range r.mcp {
			mcp.AddTool(server, &mcp.Tool{Name: "update"}, func(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
				return &mcp.CallToolResult{}, nil, server.ResourceUpdated(ctx, &mcp.ResourceUpdatedNotificationParams{URI: "test://a"})
			})
		}
		id := r.open()
		s := r.requestTo(1, http.MethodGet, id, "")
		r.subscribe(0, id, "subscribe", "test://a")
		r.requestTo(2, http.MethodPost, id, call("1", "update", `{}`)).all()
		told := make(chan bool)
		go func() {
			m := s.event()
			for m["method"] == "notifications/tools/list_changed" { // of the tool that was added
				m = s.event()
			}
			told <- m["method"] == "notifications/resources/updated"
		}()
		select {
		case ok := <-told:
			if !ok {
				t.Fatal("the stream ended, or brought something else")
			}
		case <-time.After(10 * time.Second):
			s.cut()
			<-told
			t.Fatal("not told of the update")
		}
		s.cut()
	}
}

// F17, N2 (C35): two users' requests with one id, in flight at the same time on one replica, each see themselves alone, in
// either era. An anonymous session is not a user's (C83).
func TestF17EqualIDsOfTwoUsers(t *testing.T) {
	r := newReplicas(t, 1, nil)
	arrived, go2 := make(chan struct{}, 2), make(chan struct{})
	mcp.AddTool(r.mcp[0], &mcp.Tool{Name: "whoami"}, func(_ context.Context, req *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		arrived <- struct{}{}
		<-go2
		who := req.Extra.TokenInfo.UserID + " " + req.Extra.Header.Get("Authorization")
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: who}}}, nil, nil
	})
	anonymous := r.openWith("2025-11-25", `{}`)
	r.servers[0].Config.Handler = auth.RequireBearerToken(func(_ context.Context, token string, _ *http.Request) (*auth.TokenInfo, error) {
		if token == "revoked" {
			return nil, auth.ErrInvalidToken
		}
		return &auth.TokenInfo{UserID: token, Extra: map[string]any{"iss": "https://issuer"}}, nil
	}, &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})(r.handlers[0])

	for _, era := range []string{"modern", "handshake"} {
		var both sync.WaitGroup
		for _, user := range []string{"alice", "bob"} {
			session, body := "", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"whoami","arguments":{},`+modernMeta+`}}`
			header := []string{"Authorization", "Bearer " + user, "Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", "whoami"}
			if era == "handshake" {
				header = header[:2]
				session, body = r.openWith("2025-11-25", `{}`, header...), call("1", "whoami", `{}`)
			}
			both.Go(func() {
				if a := r.requestTo(0, http.MethodPost, session, body, header...).all(); a.status != 200 || text(a.messages[0]) != user+" Bearer "+user {
					t.Errorf("%s, %s era: %d %s", user, era, a.status, a.body)
				}
			})
		}
		<-arrived
		<-arrived
		go2 <- struct{}{}
		go2 <- struct{}{}
		both.Wait()
	}
	if a := r.post(anonymous, call("1", "echo", `{}`), "Authorization", "Bearer alice"); a.status != 404 {
		t.Errorf("an anonymous session with a token: %d %s", a.status, a.body)
	}
	if a := r.post(anonymous, call("1", "echo", `{}`), "Authorization", "Bearer revoked"); a.status != 401 {
		t.Errorf("a revoked token: %d %s", a.status, a.body)
	}
}

// N2 (C77): a modern request gets log messages if it asks for them, on its own stream, and no level outlives it.
func TestN2LogLevelOfARequest(t *testing.T) {
	r := newReplicas(t, 2, nil)
	for range 2 {
		for _, level := range []string{"", "debug", "error", ""} {
			meta := modernMeta
			if level != "" {
				meta = strings.TrimSuffix(meta, "}") + `,"io.modelcontextprotocol/logLevel":"` + level + `"}`
			}
			a := r.post("", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"log","arguments":{},`+meta+`}}`,
				"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", "log")
			logged := strings.Contains(a.body, "notifications/message")
			if a.status != 200 || logged != (level == "debug") {
				t.Errorf("level %q: %d %s", level, a.status, a.body)
			}
		}
	}
}

// F15 (C57): a client that goes away does not cancel its handshake-era request, whose effect stays; a modern request's handler
// is cancelled.
func TestF15Disconnect(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		running, cancelled := make(chan struct{}), make(chan error, 1)
		finish := make(chan struct{})
		for _, server := range r.mcp {
			mcp.AddTool(server, &mcp.Tool{Name: "work"}, func(ctx context.Context, _ *mcp.CallToolRequest, in numberInput) (*mcp.CallToolResult, any, error) {
				running <- struct{}{}
				if in.By == 0 {
					<-ctx.Done()
					cancelled <- context.Cause(ctx)
					return nil, nil, ctx.Err()
				}
				<-finish
				return &mcp.CallToolResult{}, nil, errors.Join(ctx.Err(), mcpserver.Set(ctx, "done", true))
			})
		}
		leave := func(session, body string, header ...string) {
			t.Helper()
			ctx, gone := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.servers[0].URL, strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Accept", "application/json, text/event-stream")
			req.Header.Set("Content-Type", "application/json")
			for i := 0; i < len(header); i += 2 {
				req.Header.Set(header[i], header[i+1])
			}
			if session != "" {
				req.Header.Set("Mcp-Session-Id", session)
			}
			left := make(chan struct{})
			go func() {
				defer close(left)
				resp, err := r.servers[0].Client().Do(req)
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			}()
			<-running
			gone()
			<-left
		}
		id := r.open()
		leave(id, call("1", "work", `{"by":1}`))
		finish <- struct{}{}
		r.eventually(func() bool {
			return strings.Contains(text(r.requestTo(1, http.MethodPost, id, call("2", "keys", `{}`)).all().messages[0]), "done")
		})

		leave("", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"work","arguments":{},`+modernMeta+`}}`,
			"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", "work")
		if cause := <-cancelled; !errors.Is(cause, context.Canceled) {
			t.Errorf("the modern handler's context ended because of %v", cause)
		}
	})
}

// S1, S10 (C14): the requests of a busy session move its end with a write a third of the TTL, however many they are.
func TestS10TouchesAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, func(o *mcpserver.Options) { o.SessionTTL = 30 * time.Second })
		id := b.open()
		position := b.store.now()
		for range 3000 {
			resp := b.send(http.MethodPost, id, `{"jsonrpc":"2.0","id":1,"method":"ping"}`)
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Fatal(resp.Status)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if writes := b.store.now() - position; writes < 10 || writes > 31 {
			t.Errorf("%d writes in 300 s", writes)
		}
		b.stop()
	})
}

// F9 (C51): the SDK's keep-alive of a server never ends a session: what it asks is answered by the front-end, which has no
// connection that could be dead.
func TestF9KeepAlivePingEndsNoSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := mcp.NewServer(&mcp.Implementation{Name: "s", Version: "1"}, &mcp.ServerOptions{KeepAlive: time.Second})
		mcp.AddTool(server, &mcp.Tool{Name: "long"}, func(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
			select {
			case <-ctx.Done():
				return nil, nil, context.Cause(ctx)
			case <-time.After(2 * time.Minute):
				return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "done"}}}, nil, nil
			}
		})
		b := newBubbleOf(t, server, func(*mcpserver.Options) {})
		id := b.open()
		_, rest := comments(t, b.send(http.MethodPost, id, call("1", "long", `{}`)))
		if !strings.Contains(rest, "done") || strings.Contains(rest, `"ping"`) {
			t.Errorf("the call brought %s", rest)
		}
		if _, err := b.store.Read(t.Context(), id); err != nil {
			t.Errorf("the session: %v", err)
		}
		b.stop()
	})
}

// F20 (C60): what outlives the grace period is told so; nothing is left silent.
func TestF20ShutdownCutsShort(t *testing.T) {
	eachMode(t, func(t *testing.T, r *replicas) {
		id := r.open()
		waiting := r.requestTo(0, http.MethodPost, id, waitBody("1", "p"))
		waiting.event()
		grace, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.handlers[0].Shutdown(grace); !errors.Is(err, context.Canceled) {
			t.Errorf("shutdown: %v", err)
		}
		m := waiting.event()
		if raw, _ := json.Marshal(m["error"]); !strings.Contains(string(raw), "shutting down") && !strings.Contains(string(raw), "shuts down") {
			t.Errorf("the call that was cut short got %v", m)
		}
		// The lock, if there is one, is free at once.
		if a := r.requestTo(1, http.MethodPost, id, call("2", "add", `{"by":1}`)).all(); a.status != 200 || text(a.messages[0]) != "1" {
			t.Errorf("on another replica: %d %s", a.status, a.body)
		}
	})
}

// F17 (C80): to resume a stream takes more than its event id: to anyone but its user the session does not exist.
func TestF17ResumeByAnother(t *testing.T) {
	r := newReplicas(t, 2, withHistory)
	for i, s := range r.servers {
		s.Config.Handler = auth.RequireBearerToken(func(_ context.Context, token string, _ *http.Request) (*auth.TokenInfo, error) {
			return &auth.TokenInfo{UserID: token}, nil
		}, &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})(r.handlers[i])
	}
	const alice, bob = "Bearer alice", "Bearer bob"
	id := r.openWith("2025-11-25", `{"elicitation":{}}`, "Authorization", alice)
	s := r.request(http.MethodPost, id, call("1", "ask", `{}`), "Authorization", alice)
	event, data := s.eventWithID()
	for data == "" {
		event, data = s.eventWithID()
	}
	if a := r.request(http.MethodGet, id, "", "Authorization", bob, "Last-Event-ID", event).all(); a.status != 404 || strings.Contains(a.body, "ask") {
		t.Errorf("resumed by another: %d %s", a.status, a.body)
	}
	question := map[string]any{}
	if err := json.Unmarshal([]byte(data), &question); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	if a := r.post(id, accept(question["id"], "forged"), "Authorization", bob); a.status != 404 {
		t.Errorf("answered by another: %d %s", a.status, a.body)
	}
	r.post(id, accept(question["id"], "x"), "Authorization", alice)
	if got := text(s.event()); got != `["x"]` {
		t.Errorf("result %s", got)
	}
}
