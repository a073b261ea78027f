// SPDX-License-Identifier: Apache-2.0

// Package manual makes man pages and shell completions from the output of --help.
package manual

import (
	"fmt"
	"regexp"
	"strings"
)

// Manual is the help of a program.
type Manual struct {
	About    string // one sentence
	More     string // the text below the commands
	Commands []Command
}

// Command is the help of a subcommand.
type Command struct {
	Name, Brief string
	Usage       string // without the program: "stats [flags] [MODEL]"
	About       string
	Flags       []Flag
	Examples    string
}

// TakesModel reports whether the command takes names of models.
func (c *Command) TakesModel() bool { return strings.Contains(c.Usage, "MODEL") }

// Flag is one flag of a command.
type Flag struct {
	Name, Value, Help string // Value is "" for a switch
}

var (
	groupTitle  = regexp.MustCompile(`^[A-Z][a-z]+$`)
	commandLine = regexp.MustCompile(`^  ([a-z]+) +(\S.*)$`)
	flagLine    = regexp.MustCompile(`^ +(?:-\w, )?--([\w-]+)(?: (\S+(?: \S+)*))?(?:   ?\s*(\S.*))?$`)
	moreOfFlag  = regexp.MustCompile(`^ {12,}(\S.*)$`)
)

// Read reads the help of a program. run returns its output for the arguments.
func Read(program string, run func(args ...string) (string, error)) (*Manual, error) {
	text, err := run("--help")
	if err != nil {
		return nil, fmt.Errorf("%s --help: %w", program, err)
	}
	about, rest, found := strings.Cut(text, "\n\nUsage: ")
	if !found {
		return nil, fmt.Errorf("%s --help: no usage in %q", program, text)
	}
	m := &Manual{About: about}
	_, rest, _ = strings.Cut(rest, "\n\n")
	policy := Command{}
	if text, err := run("help", "policy"); err == nil {
		policy.read(program, text)
	}
	for part := range strings.SplitSeq(rest, "\n\n") {
		title, list, _ := strings.Cut(part, "\n")
		if !groupTitle.MatchString(title) {
			m.More += part + "\n\n"
			continue
		}
		for line := range strings.Lines(list) {
			found := commandLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
			if found == nil {
				return nil, fmt.Errorf("%s --help: line %q names no command", program, line)
			}
			c := Command{Name: found[1], Brief: found[2], Usage: found[1]}
			help, err := run(c.Name, "--help")
			if err != nil {
				return nil, fmt.Errorf("%s %s --help: %w", program, c.Name, err)
			}
			if c.read(program, help) {
				c.Flags = append(c.Flags, policy.Flags...)
			}
			m.Commands = append(m.Commands, c)
		}
	}
	m.More = strings.TrimSpace(m.More)
	if len(m.Commands) == 0 {
		return nil, fmt.Errorf("%s --help: no commands", program)
	}
	return m, nil
}

// read parses a command's help. It returns true if the help names the policy's flags.
func (c *Command) read(program, help string) (policy bool) {
	var about, examples, names []string
	into := &about
	for line := range strings.Lines(help) {
		line = strings.TrimRight(line, " \n")
		indented := strings.HasPrefix(line, "  ")
		switch flag := flagLine.FindStringSubmatch(line); {
		case strings.HasPrefix(line, "Usage: "+program+" "):
			c.Usage = strings.TrimPrefix(line, "Usage: "+program+" ")
		case line == "Examples:":
			into = &examples
		case line == "Flags:":
			into = &about
		case strings.HasPrefix(line, "Policy flags"):
			policy, into = true, &names // explained elsewhere
		case flag != nil && into == &about:
			c.Flags = append(c.Flags, Flag{Name: flag[1], Value: flag[2], Help: flag[3]})
		case into == &about && len(c.Flags) > 0 && moreOfFlag.MatchString(line):
			c.Flags[len(c.Flags)-1].Help += " " + strings.TrimSpace(line)
		case line != "" && !indented && into == &examples:
			into = &about
			fallthrough
		default:
			*into = append(*into, line)
		}
	}
	c.About = strings.TrimSpace(strings.Join(about, "\n"))
	c.Examples = strings.Trim(strings.Join(examples, "\n"), "\n")
	return policy
}
