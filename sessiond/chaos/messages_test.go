package chaos

import (
	"strings"
	"testing"
)

// What may be delivered and what may not.
func TestConversations(t *testing.T) {
	first := publication{payload: "a", call: 1, ret: 2, acknowledged: true, position: 10}
	second := publication{payload: "b", call: 3, ret: 4, acknowledged: true, position: 20}
	unknown := publication{payload: "c", call: 5, ret: 6}
	for name, c := range map[string]struct {
		published []publication
		delivered [][]delivery
		want      string // in what is found; empty: nothing is
	}{
		"all in order":              {[]publication{first, second}, [][]delivery{{{"a", 10}, {"b", 20}}, {{"a", 10}, {"b", 20}}}, ""},
		"an unknown one for none":   {[]publication{first, unknown}, [][]delivery{{{"a", 10}}, {{"a", 10}}}, ""},
		"an unknown one for all":    {[]publication{first, unknown}, [][]delivery{{{"a", 10}, {"c", 30}}, {{"a", 10}, {"c", 30}}}, ""},
		"an unknown one after all":  {[]publication{first, unknown}, [][]delivery{{{"a", 10}, {"c", 30}}, {{"a", 10}}}, ""},
		"an unknown one for some":   {[]publication{first, second, unknown}, [][]delivery{{{"a", 10}, {"c", 15}, {"b", 20}}, {{"a", 10}, {"b", 20}}}, "never got"},
		"one missing":               {[]publication{first, second}, [][]delivery{{{"a", 10}, {"b", 20}}, {{"b", 20}}}, "never got"},
		"one twice":                 {[]publication{first}, [][]delivery{{{"a", 10}, {"a", 10}}}, "twice"},
		"one at two positions":      {[]publication{unknown}, [][]delivery{{{"c", 30}, {"c", 31}}}, "positions"},
		"out of order":              {[]publication{first, second}, [][]delivery{{{"b", 20}, {"a", 10}}}, "after 20"},
		"a position of another":     {[]publication{first}, [][]delivery{{{"a", 11}}}, "delivered at 11"},
		"one that nobody published": {[]publication{first}, [][]delivery{{{"a", 10}, {"x", 12}}}, "nobody published"},
		"positions against time": {[]publication{
			{payload: "a", call: 1, ret: 2, acknowledged: true, position: 20}, {payload: "b", call: 3, ret: 4, acknowledged: true, position: 10},
		}, [][]delivery{{{"b", 10}, {"a", 20}}}, "higher position"},
		"positions of two at once": {[]publication{
			{payload: "a", call: 1, ret: 4, acknowledged: true, position: 20}, {payload: "b", call: 3, ret: 5, acknowledged: true, position: 10},
		}, [][]delivery{{{"b", 10}, {"a", 20}}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			found := checkMessages(&conversation{session: "s", published: c.published, delivered: c.delivered})
			var text strings.Builder
			for _, v := range found {
				text.WriteString(v.Text + "\n")
			}
			if (c.want == "") != (len(found) == 0) || !strings.Contains(text.String(), c.want) {
				t.Errorf("found %q, want %q", text.String(), c.want)
			}
		})
	}
}
