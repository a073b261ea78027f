// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"fmt"
	"strings"
	"time"
)

// Pages are the man pages by file name: for the program and for each command.
func (m *Manual) Pages(program, version string, date time.Time) map[string]string {
	head := func(name, brief string) string {
		return fmt.Sprintf(".\\\" Made from the commands' --help.\n.TH %s 1 %s \"%s %s\"\n.SH NAME\n%s \\- %s\n.SH SYNOPSIS\n",
			strings.ToUpper(roff(name)), date.UTC().Format(time.DateOnly), program, version, roff(name), roff(brief))
	}
	pages := map[string]string{}
	var b, also strings.Builder
	brief := strings.TrimSuffix(strings.TrimPrefix(m.About, program+" "), ".")
	b.WriteString(head(program, brief) + ".B " + program + "\nCOMMAND [flags]\n.SH COMMANDS\n")
	for i := range m.Commands {
		c := &m.Commands[i]
		name := program + "-" + c.Name
		fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roff(name), paragraph(c.Brief))
		pages[name+".1"] = head(name, c.Brief) + c.body(program)
		if i > 0 {
			also.WriteString(",\n")
		}
		fmt.Fprintf(&also, ".BR %s (1)", roff(name))
	}
	b.WriteString(".SH DESCRIPTION\n" + verbatimWhereIndented(m.More) + ".SH SEE ALSO\n" + also.String() + "\n")
	pages[program+".1"] = b.String()
	return pages
}

func (c *Command) body(program string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".B %s\n%s\n.SH DESCRIPTION\n%s", program, paragraph(c.Usage), verbatimWhereIndented(c.About))
	if len(c.Flags) > 0 {
		b.WriteString(".SH OPTIONS\n")
	}
	for _, f := range c.Flags {
		fmt.Fprintf(&b, ".TP\n\\fB\\-\\-%s\\fR", roff(f.Name))
		if f.Value != "" {
			fmt.Fprintf(&b, " \\fI%s\\fR", roff(f.Value))
		}
		fmt.Fprintf(&b, "\n%s\n", paragraph(f.Help))
	}
	if c.Examples != "" {
		b.WriteString(".SH EXAMPLES\n" + verbatim(c.Examples))
	}
	fmt.Fprintf(&b, ".SH SEE ALSO\n.BR %s (1)\n", program)
	return b.String()
}

// roff escapes text for troff.
func roff(text string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
}

// paragraph escapes a line so that troff does not read it as a request.
func paragraph(text string) string {
	text = roff(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}

func verbatim(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = paragraph(line)
	}
	return ".nf\n" + strings.Join(lines, "\n") + "\n.fi\n"
}

// verbatimWhereIndented fills paragraphs and keeps indented ones as they are.
func verbatimWhereIndented(text string) string {
	var b strings.Builder
	for i, part := range strings.Split(text, "\n\n") {
		if i > 0 {
			b.WriteString(".PP\n")
		}
		if strings.HasPrefix(part, "  ") {
			b.WriteString(verbatim(part))
			continue
		}
		for line := range strings.Lines(part) {
			b.WriteString(paragraph(strings.TrimSpace(line)) + "\n")
		}
	}
	return b.String()
}
