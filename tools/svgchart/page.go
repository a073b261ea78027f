// SPDX-License-Identifier: Apache-2.0

package svgchart

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// page collects SVG elements.
type page struct{ buf bytes.Buffer }

type anchor string

const (
	start  anchor = "start"
	middle anchor = "middle"
	end    anchor = "end"
)

type textStyle struct {
	size    float64
	bold    bool
	anchor  anchor
	colour  string
	upwards bool // turned, to be read from below
}

func newPage(width, height float64) *page {
	p := &page{}
	fmt.Fprintf(&p.buf, `<svg xmlns="http://www.w3.org/2000/svg" width="%[1]s" height="%[2]s" viewBox="0 0 %[1]s %[2]s" `+
		`font-family="Helvetica, Arial, sans-serif">`+"\n", px(width), px(height))
	p.rect(0, 0, width, height, "#ffffff", "")
	return p
}

func (p *page) writeTo(w io.Writer) error {
	p.buf.WriteString("</svg>\n")
	_, err := w.Write(p.buf.Bytes())
	return err
}

// px writes a coordinate with at most two decimals.
func px(x float64) string {
	return strconv.FormatFloat(math.Round(100*x)/100, 'f', -1, 64)
}

func (p *page) text(x, y float64, text string, s textStyle) {
	if s.colour == "" {
		s.colour = ink
	}
	extra := ""
	if s.bold {
		extra += ` font-weight="bold"`
	}
	if s.upwards {
		extra += fmt.Sprintf(` transform="rotate(-90 %s %s)"`, px(x), px(y))
	}
	fmt.Fprintf(&p.buf, `<text x="%s" y="%s" font-size="%s" text-anchor="%s" fill="%s"%s>%s</text>`+"\n",
		px(x), px(y), px(s.size), s.anchor, s.colour, extra, escape(text))
}

func (p *page) line(x1, y1, x2, y2 float64, colour string) {
	fmt.Fprintf(&p.buf, `<line x1="%s" y1="%s" x2="%s" y2="%s" stroke="%s"/>`+"\n", px(x1), px(y1), px(x2), px(y2), colour)
}

// rect draws a rectangle; tip, if any, shows when the mouse is over it.
func (p *page) rect(x, y, w, h float64, colour, tip string) {
	fmt.Fprintf(&p.buf, `<rect x="%s" y="%s" width="%s" height="%s" fill="%s"`, px(x), px(y), px(w), px(h), colour)
	if tip == "" {
		p.buf.WriteString("/>\n")
		return
	}
	fmt.Fprintf(&p.buf, "><title>%s</title></rect>\n", escape(tip))
}

func (p *page) polyline(xs, ys []float64, colour string, dashed bool) {
	var points strings.Builder
	for i := range xs {
		if i > 0 {
			points.WriteByte(' ')
		}
		points.WriteString(px(xs[i]) + "," + px(ys[i]))
	}
	dash := ""
	if dashed {
		dash = ` stroke-dasharray="6 4"`
	}
	fmt.Fprintf(&p.buf, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2" stroke-linejoin="round"%s/>`+"\n",
		points.String(), colour, dash)
}

func escape(text string) string {
	var b strings.Builder
	if err := xml.EscapeText(&b, []byte(text)); err != nil {
		return ""
	}
	return b.String()
}
