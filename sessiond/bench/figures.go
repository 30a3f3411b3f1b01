//go:build unix

package main

import (
	"fmt"
	"io"
)

// Figures belong together and are not a comparison of contestants.
type figures struct {
	Title   string
	Figures []*figure
}

// A figure may have a bound that it must not exceed.
type figure struct {
	What  string
	Value float64
	Unit  string   `json:",omitempty"`
	Bound *float64 `json:",omitempty"`
}

func (f *figures) add(what string, value float64, unit string) *figure {
	x := &figure{What: what, Value: value, Unit: unit}
	f.Figures = append(f.Figures, x)
	return x
}

func (f *figures) text(out io.Writer) {
	fmt.Fprintf(out, "\n%s\n\n", f.Title)
	var t table
	for _, x := range f.Figures {
		t.row(x.What, number(x.Value)+unit(x.Unit))
	}
	t.write(out)
}
