// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch"
	"github.com/ringbatch/ringbatch/admin"
)

// completions are the scripts by shell. They ask `ringbatch complete`, and complete files where it knows nothing.
var completions = map[string]string{
	"bash": `_ringbatch() {
	mapfile -t COMPREPLY < <("${COMP_WORDS[0]}" complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _ringbatch ringbatch
`,
	"zsh": `#compdef ringbatch
_ringbatch() {
	local -a found
	found=(${(f)"$($words[1] complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
	compadd -a found || _files
}
if [ "$funcstack[1]" = _ringbatch ]; then _ringbatch "$@"; else compdef _ringbatch ringbatch; fi
`,
	"fish": `complete -c ringbatch -a '(ringbatch complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
`,
}

func runCompletion(_ context.Context, args []string) error {
	shells := strings.Join(slices.Sorted(maps.Keys(completions)), ", ")
	f := flags("completion", " SHELL", "Print a completion script for a shell: "+shells+".",
		`  source <(ringbatch completion bash)
  ringbatch completion zsh > "${fpath[1]}/_ringbatch"
  ringbatch completion fish > ~/.config/fish/completions/ringbatch.fish
`)
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	script, ok := completions[f.Arg(0)]
	if !ok {
		return fmt.Errorf("%w: no completion for the shell %q, only for %s", errUsage, f.Arg(0), shells)
	}
	_, err := fmt.Print(script)
	return err
}

// Flags in the output of --help. A line of one flag has its value after one blank, and its text after more.
var (
	flagNames = regexp.MustCompile(`(?m)(?:^ +|  )(--[\w-]+)`)
	flagLine  = regexp.MustCompile(`^ +(?:-\w, )?(--[\w-]+(?: \S+)*)  +(\S.*)$`)
)

// runComplete prints what may stand for the last of the words: commands, flags, or models of the running broker.
func runComplete(ctx context.Context, words []string) error {
	if len(words) == 0 {
		return nil
	}
	var found []string
	if len(words) == 1 {
		for _, c := range commands() {
			found = append(found, c.name)
		}
	} else if help, err := helpOf(ctx, words[0]); err != nil {
		return err
	} else if last := words[len(words)-1]; strings.HasPrefix(last, "-") {
		for _, flag := range append(flagNames.FindAllStringSubmatch(help, -1), []string{"", "--help"}) {
			found = append(found, flag[1])
		}
	} else if usage, _, _ := strings.Cut(help[strings.Index(help, "Usage:"):], "\n"); strings.Contains(usage, "MODEL") &&
		!regexp.MustCompile(`(?m)^ +`+regexp.QuoteMeta(words[len(words)-2])+` \S`).MatchString(help) { // it is no flag's value
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		models, err := admin.New("").Models(ctx)
		if err != nil {
			return err
		}
		for _, m := range models {
			found = append(found, m.Name)
		}
	}
	for _, word := range found {
		if strings.HasPrefix(word, words[len(words)-1]) {
			fmt.Println(word)
		}
	}
	return nil
}

// helpOf is the --help of a command, some of which Python has; "" means the program's.
func helpOf(ctx context.Context, command string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	args := []string{command, "--help"}
	if command == "" {
		args = args[1:]
	}
	out, err := exec.CommandContext(ctx, self, args...).Output()
	return string(out), err
}

// runManual writes the man pages and completions into a folder, for packages.
// $SOURCE_DATE_EPOCH is their date: the same commit gives the same pages.
func runManual(ctx context.Context, args []string) error {
	f := flags("manual", " FOLDER", "Write the man pages and the shells' completions into a folder.", "")
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	date := time.Now()
	if epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
		date = time.Unix(epoch, 0)
	}
	files := map[string]string{}
	for shell, script := range completions {
		files["ringbatch."+shell] = script
	}
	for _, c := range append(commands(), command{brief: "batching broker for inference, in shared memory"}) {
		help, err := helpOf(ctx, c.name)
		if err != nil {
			return fmt.Errorf("ringbatch %s --help: %w", c.name, err)
		}
		name := strings.TrimSuffix("ringbatch-"+c.name, "-")
		files[name+".1"] = manPage(name, c.brief, help, date)
	}
	if err := os.MkdirAll(f.Arg(0), 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(f.Arg(0), name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// manPage is a command's help for troff, with its flags as a list.
func manPage(name, brief, help string, date time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s 1 %s \"ringbatch %s\"\n.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n.nf\n", strings.ToUpper(name),
		date.UTC().Format(time.DateOnly), ringbatch.Version(), roff(name), roff(brief))
	listed := false
	for line := range strings.SplitSeq(help, "\n") {
		flag := flagLine.FindStringSubmatch(line)
		if flag != nil {
			fmt.Fprintf(&b, ".fi\n.TP\n.B %s\n%s\n", roff(flag[1]), roff(flag[2]))
		} else {
			if listed {
				b.WriteString(".PP\n.nf\n")
			}
			b.WriteString(roff(line) + "\n")
		}
		listed = flag != nil
	}
	b.WriteString(".fi\n.SH SEE ALSO\n.BR ringbatch (1)\n")
	return b.String()
}

// roff escapes a line, so that troff does not read it as a request.
func roff(line string) string {
	line = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(line)
	if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
		line = `\&` + line
	}
	return line
}
