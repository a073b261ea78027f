// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"fmt"
	"strings"
)

// Shells are the shells that Completion supports.
var Shells = []string{"bash", "zsh", "fish"}

// Completion is a script for the shell that completes commands, flags, the models of the
// running broker, and files. It is "" for an unknown shell.
func (m *Manual) Completion(program, shell string) string {
	switch shell {
	case "bash":
		return m.bash(program)
	case "zsh":
		return m.zsh(program)
	case "fish":
		return m.fish(program)
	}
	return ""
}

func (m *Manual) names() string {
	var names []string
	for _, c := range m.Commands {
		names = append(names, c.Name)
	}
	return strings.Join(names, " ")
}

func (m *Manual) bash(program string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# bash completion of %[1]s, made from its --help.

_%[1]s_models() {
	local name _
	%[1]s models 2>/dev/null | tail -n +2 | while read -r name _; do printf '%%s\n' "$name"; done
}

_%[1]s() {
	local word=${COMP_WORDS[COMP_CWORD]} flags='' valued='' models=''
	COMPREPLY=()
	if [ "$COMP_CWORD" -eq 1 ]; then
		mapfile -t COMPREPLY < <(compgen -W '%[2]s' -- "$word")
		return
	fi
	case ${COMP_WORDS[1]} in
`, program, m.names())
	for _, c := range m.Commands {
		var flags, valued []string
		for _, f := range c.Flags {
			if flags = append(flags, "--"+f.Name); f.Value != "" {
				valued = append(valued, "--"+f.Name)
			}
		}
		fmt.Fprintf(&b, "\t%s) flags='%s --help' valued=' %s '", c.Name, strings.Join(flags, " "), strings.Join(valued, " "))
		if c.TakesModel() {
			b.WriteString(" models=yes")
		}
		b.WriteString(" ;;\n")
	}
	fmt.Fprintf(&b, `	esac
	if [[ $word == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word")
	elif [[ $valued != *" ${COMP_WORDS[COMP_CWORD-1]} "* && -n $models ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$(_%[1]s_models)" -- "$word")
	fi
}

complete -o default -F _%[1]s %[1]s
`, program)
	return b.String()
}

// zshText escapes text for single quotes of zsh and for _arguments, to which colons and
// brackets have a meaning.
func zshText(text string) string {
	return strings.NewReplacer(`'`, `'\''`, `[`, `\[`, `]`, `\]`, `:`, `\:`).Replace(text)
}

func (m *Manual) zsh(program string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `#compdef %[1]s
# zsh completion of %[1]s, made from its --help.

_%[1]s_models() {
	local -a models
	models=(${${(f)"$(%[1]s models 2>/dev/null | tail -n +2)"}%%%% *})
	compadd -a models
}

_%[1]s() {
	local -a commands
	commands=(
`, program)
	for _, c := range m.Commands {
		fmt.Fprintf(&b, "\t\t'%s:%s'\n", c.Name, strings.ReplaceAll(c.Brief, `'`, `'\''`))
	}
	b.WriteString(`	)
	if (( CURRENT == 2 )); then
		_describe command commands
		return
	fi
	local command=$words[2]
	shift words
	(( CURRENT-- ))
	case $command in
`)
	for _, c := range m.Commands {
		fmt.Fprintf(&b, "\t%s)\n\t\t_arguments '--help[show the flags]'", c.Name)
		for _, f := range c.Flags {
			fmt.Fprintf(&b, " \\\n\t\t\t'*--%s[%s]", f.Name, zshText(f.Help))
			if f.Value != "" {
				fmt.Fprintf(&b, ":%s:_files", zshText(f.Value))
			}
			b.WriteString("'")
		}
		rest := "_files"
		if c.TakesModel() {
			rest = "_" + program + "_models"
		}
		fmt.Fprintf(&b, " \\\n\t\t\t'*:: :%s' ;;\n", rest)
	}
	fmt.Fprintf(&b, "\tesac\n}\n\nif [ \"$funcstack[1]\" = _%[1]s ]; then\n\t_%[1]s \"$@\"\nelse\n\tcompdef _%[1]s %[1]s\nfi\n", program)
	return b.String()
}

func fishText(text string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(text) + "'"
}

func (m *Manual) fish(program string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# fish completion of %[1]s, made from its --help.

function __%[1]s_models
	%[1]s models 2>/dev/null | tail -n +2 | string replace -r ' .*' ''
end

`, program)
	for _, c := range m.Commands {
		fmt.Fprintf(&b, "complete -c %s -f -n __fish_use_subcommand -a %s -d %s\n", program, c.Name, fishText(c.Brief))
		at := fmt.Sprintf("complete -c %s -n '__fish_seen_subcommand_from %s'", program, c.Name)
		for _, f := range c.Flags {
			fmt.Fprintf(&b, "%s -l %s -d %s", at, f.Name, fishText(f.Help))
			if f.Value != "" {
				b.WriteString(" -r")
			}
			b.WriteString("\n")
		}
		if c.TakesModel() {
			fmt.Fprintf(&b, "%s -f -a '(__%s_models)'\n", at, program)
		}
	}
	return b.String()
}
