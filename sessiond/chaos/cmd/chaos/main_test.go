//go:build unix

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is wrong with the command line is said at once, before anything is started.
func TestRun(t *testing.T) {
	saved := filepath.Join(t.TempDir(), "history.jsonl")
	history := `{"session":"s","client":1,"kind":"create","outcome":"ok","call":1,"return":2,"value":"a","ttl":3600000000000,"revision":5,"attempts":1}
{"session":"s","client":1,"kind":"read","outcome":"ok","call":3,"return":4,"got":"b","revision":5,"attempts":1}
`
	if err := os.WriteFile(saved, []byte(history), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no such flag":           {[]string{"--none"}, exitUsage, "flag provided but not defined"},
		"an argument":            {[]string{"more"}, exitUsage, `unexpected argument "more"`},
		"no time":                {[]string{"--duration", "-1s"}, exitUsage, "want more than 0"},
		"no such fault":          {[]string{"--faults", "kill-node,flood"}, exitUsage, `no fault "flood"`},
		"a fault of front-ends":  {[]string{"--faults", "kill-front-end"}, exitUsage, `no fault "kill-front-end"`},
		"a folder in use":        {[]string{"--dir", filepath.Dir(saved)}, exitUsage, "is not empty"},
		"a history":              {[]string{"--explain", saved}, 0, "Illegal"},
		"a history that is none": {[]string{"--explain", filepath.Join(t.TempDir(), "none")}, exitFailed, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if code := run(t.Context(), c.args, &out, &out); code != c.code || !strings.Contains(out.String(), c.want) {
				t.Errorf("%d: %s\nwant %d: %s", code, out.String(), c.code, c.want)
			}
		})
	}
}
