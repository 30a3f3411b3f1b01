//go:build unix

package main

import (
	"fmt"
	"image/color"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

var (
	ourColor   = color.RGBA{R: 0x1f, G: 0x77, B: 0xb4, A: 0xff}
	theirColor = color.RGBA{R: 0xb0, G: 0xb0, B: 0xb0, A: 0xff}
	limitColor = color.RGBA{R: 0xe0, G: 0xc0, B: 0x60, A: 0xff}
)

// plot draws two pictures for each work: how many a second, and how long one takes.
func (r *report) plot(dir string) error {
	for _, w := range r.Works {
		rates, latencies := bars{title: w.Title, axis: w.Unit}, bars{title: w.Title, axis: "ms; bar: half of them, number in parentheses: 99 % of them"}
		for _, c := range slices.Backward(w.Contestants) {
			if c.Failed != "" {
				continue
			}
			rates.add(c.Name, c.Median.Rate, number(c.Median.Rate))
			latencies.add(c.Name, c.Median.P50/1e3, fmt.Sprintf("%s (%s)", number(c.Median.P50/1e3), number(c.Median.P99/1e3)))
		}
		if err := rates.save(filepath.Join(dir, w.Name+"-rate.svg")); err != nil {
			return err
		}
		if err := latencies.save(filepath.Join(dir, w.Name+"-latency.svg")); err != nil {
			return err
		}
	}
	return nil
}

// bars are horizontal, one below the other, the last one on top.
type bars struct {
	title, axis string
	names       []string
	values      plotter.Values
	labels      []string
}

func (b *bars) add(name string, value float64, label string) {
	b.names, b.values, b.labels = append(b.names, name), append(b.values, value), append(b.labels, label)
}

func (b *bars) save(path string) error {
	if len(b.values) == 0 {
		return nil
	}
	const thick = 12
	p := plot.New()
	p.Title.Text, p.X.Label.Text = b.title, b.axis
	p.X.Min, p.X.Max = 0, 1.25*slices.Max(b.values) // room for the labels
	points := plotter.XYLabels{Labels: b.labels}
	for i, v := range b.values {
		one, err := plotter.NewBarChart(plotter.Values{v}, vg.Points(thick))
		if err != nil {
			return err
		}
		one.Horizontal, one.XMin, one.LineStyle.Width = true, float64(i), 0
		switch name := b.names[i]; {
		case slices.Contains([]string{nameEmbedded, nameSeparate, nameCluster}, name):
			one.Color = ourColor
		case slices.Contains([]string{namePut, namePut3, nameEmpty}, name):
			one.Color = limitColor
		default:
			one.Color = theirColor
		}
		p.Add(one)
		points.XYs = append(points.XYs, plotter.XY{X: v, Y: float64(i)})
	}
	labels, err := plotter.NewLabels(points)
	if err != nil {
		return err
	}
	labels.Offset.X = vg.Points(3)
	for i := range labels.TextStyle {
		labels.TextStyle[i].YAlign = -0.4
	}
	p.Add(labels)
	p.NominalY(b.names...)
	return p.Save(vg.Points(640), vg.Points(float64(90+2*thick*len(b.values))), path)
}
