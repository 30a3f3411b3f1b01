//go:build unix

package chaos

import (
	"strings"
	"testing"
)

// What the clients of front-ends may see and what they may not.
func TestVisits(t *testing.T) {
	add := func(call, ret, total int64) mcpCall { return mcpCall{call: call, ret: ret, ok: true, total: total} }
	set := func(call int64, value string, ok bool) mcpCall {
		return mcpCall{call: call, ret: call + 1, key: "k", value: value, ok: ok}
	}
	for name, c := range map[string]struct {
		visit visit
		want  string // in what is found; empty: nothing is
	}{
		"counted":               {visit{locked: true, total: 2, calls: []mcpCall{add(1, 2, 1), add(3, 4, 2)}}, ""},
		"an unknown one counts": {visit{locked: true, total: 2, calls: []mcpCall{add(1, 2, 1), {call: 3, ret: 4}}}, ""},
		"an unknown one not":    {visit{locked: true, total: 1, calls: []mcpCall{add(1, 2, 1), {call: 3, ret: 4}}}, ""},
		"an update lost":        {visit{locked: true, total: 1, calls: []mcpCall{add(1, 2, 1), add(1, 4, 1)}}, "two additions were answered 1"},
		"the end is less":       {visit{locked: true, total: 1, calls: []mcpCall{add(1, 2, 1), add(3, 4, 2)}}, "the total is 1"},
		"one done twice":        {visit{locked: true, total: 3, calls: []mcpCall{add(1, 2, 1), add(3, 4, 2)}}, "the total is 3"},
		"totals against time":   {visit{locked: true, total: 2, calls: []mcpCall{add(1, 2, 2), add(3, 4, 1)}}, "began after a later total"},
		"totals at once":        {visit{locked: true, total: 2, calls: []mcpCall{add(1, 4, 2), add(3, 4, 1)}}, ""},
		"without the lock":      {visit{total: 1, calls: []mcpCall{add(1, 2, 1), add(1, 4, 1)}}, ""},
		"a note":                {visit{notes: map[string]string{"k": "b"}, calls: []mcpCall{set(1, "a", true), set(3, "b", true)}}, ""},
		"a note, unknown":       {visit{notes: map[string]string{"k": "b"}, calls: []mcpCall{set(1, "a", true), set(3, "b", false)}}, ""},
		"a note, not changed":   {visit{notes: map[string]string{"k": "a"}, calls: []mcpCall{set(1, "a", true), set(3, "b", false)}}, ""},
		"a note lost":           {visit{notes: map[string]string{"k": "a"}, calls: []mcpCall{set(1, "a", true), set(3, "b", true)}}, "acknowledged last"},
		"a note gone":           {visit{calls: []mcpCall{set(1, "a", true)}}, "acknowledged last"},
		"what was seen before":  {visit{violations: []Violation{{Text: "404"}}}, "404"},
	} {
		t.Run(name, func(t *testing.T) {
			var text strings.Builder
			found := checkVisit(&c.visit)
			for _, v := range found {
				text.WriteString(v.Text + "\n")
			}
			if (c.want == "") != (len(found) == 0) || !strings.Contains(text.String(), c.want) {
				t.Errorf("found %q, want %q", text.String(), c.want)
			}
		})
	}
}
