package main

import (
	"context"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/tensor"
)

// The library and the programs that use it are built once for all tests.
var built struct{ dir, plain, asan string }

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "cbindings")
	if err != nil {
		panic(err)
	}
	built.dir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// sources are the program that uses the whole header.
var sources = []string{"testdata/every.c", "testdata/misuse.c"}

// program builds it against the library.
func program(t *testing.T, flags ...string) string {
	t.Helper()
	lib := filepath.Join(built.dir, "libringbatch.so")
	if _, err := os.Stat(lib); err != nil {
		run(t, "go", "build", "-buildmode=c-shared", "-o", lib, ".")
	}
	exe := filepath.Join(built.dir, "every"+strings.Join(flags, ""))
	if _, err := os.Stat(exe); err != nil {
		args := slices.Concat([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I.", "-o", exe}, sources,
			[]string{"-L" + built.dir, "-lringbatch", "-lpthread", "-Wl,-rpath," + built.dir}, flags)
		run(t, "gcc", args...)
	}
	return exe
}

func startBroker(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "b.sock")
	b, err := broker.New(broker.Config{Socket: socket, OpenFolder: true, DrainTime: time.Second, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return socket
}

// execute runs a program that must print ok.
func execute(t *testing.T, env []string, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "ok\n") {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

func TestCProgramUsesEveryFunction(t *testing.T) {
	execute(t, nil, program(t), startBroker(t), "5")
}

func TestCProgramUnderAddressSanitizer(t *testing.T) {
	exe := program(t, "-fsanitize=address,undefined")
	// The Go runtime takes SIGSEGV over and never frees its own memory.
	env := []string{"ASAN_OPTIONS=handle_segv=0:detect_leaks=0:abort_on_error=0"}
	execute(t, env, exe, startBroker(t), "3")
}

func TestCProgramUnderValgrind(t *testing.T) {
	if testing.Short() {
		t.Skip("slow")
	}
	if _, err := exec.LookPath("valgrind"); err != nil {
		t.Skip("no valgrind here")
	}
	execute(t, []string{"RB_SLOW=1"}, "valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite",
		"--show-leak-kinds=definite", "--suppressions=testdata/go.supp", "--fair-sched=yes", program(t), startBroker(t), "1")
}

func TestEveryFunctionOfTheHeaderIsUsedAndExported(t *testing.T) {
	header, err := os.ReadFile("ringbatch.h")
	if err != nil {
		t.Fatal(err)
	}
	var source []byte
	for _, file := range sources {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source = append(source, text...)
	}
	program(t)
	symbols := run(t, "nm", "-D", "--defined-only", filepath.Join(built.dir, "libringbatch.so"))
	functions := regexp.MustCompile(`(?m)^RB_API [^(]*?\*?(rb_\w+)\(`).FindAllStringSubmatch(string(header), -1)
	if len(functions) < 40 {
		t.Fatalf("the header declares only %d functions?", len(functions))
	}
	for _, f := range functions {
		if !regexp.MustCompile(`\b` + f[1] + `\(`).Match(source) {
			t.Errorf("%s is not used by the program", f[1])
		}
		if !strings.Contains(symbols, " T "+f[1]+"\n") {
			t.Errorf("%s is not exported by the library", f[1])
		}
	}
}

func TestTheHeaderHasEveryDType(t *testing.T) {
	header, err := os.ReadFile("ringbatch.h")
	if err != nil {
		t.Fatal(err)
	}
	for d := tensor.Bool; d <= tensor.F64; d++ {
		if !strings.Contains(string(header), "RB_"+strings.ToUpper(d.String())) {
			t.Errorf("dtype %s is not in the header", d)
		}
	}
}
