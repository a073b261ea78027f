// SPDX-License-Identifier: Apache-2.0

// Package cbindings tests the C library: a program calls every function, with
// right and wrong arguments, plain and under sanitizers.
package cbindings

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

// Tests run in parallel. The first test that needs a program or a variant of the library builds it for all.
var (
	built  string
	builds sync.Map // by name: a func() error
)

// once calls build, unless another test has done so under that name.
func once(t *testing.T, name string, build func() error) {
	t.Helper()
	f, _ := builds.LoadOrStore(name, sync.OnceValue(build))
	must.Do(t, f.(func() error)())
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "cbindings")
	if err != nil {
		panic(err)
	}
	built = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := tryRun(name, args...)
	must.Do(t, err)
	return out
}

func tryRun(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// sources are the program that calls every function of the header.
var sources = []string{"testdata/every.c", "testdata/serving.c", "testdata/misuse.c", "testdata/sequences.c", "testdata/reaping.c"}

// library builds and installs the library once, as a user would.
func library(t *testing.T) (prefix string) {
	t.Helper()
	prefix = filepath.Join(built, "prefix")
	once(t, prefix, func() error {
		_, err := tryRun("make", "-j2", "install", "BUILD="+filepath.Join(built, "objects"), "PREFIX="+prefix)
		return err
	})
	return prefix
}

// program builds sources against the installed library.
func program(t *testing.T) string {
	t.Helper()
	prefix := library(t)
	exe := filepath.Join(built, "every")
	once(t, exe, func() error {
		_, err := tryRun("cc", slices.Concat([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I" + prefix +
			"/include", "-o", exe}, sources,
			[]string{"-L" + prefix + "/lib", "-lringbatch", "-pthread", "-Wl,-rpath," + prefix + "/lib"})...)
		return err
	})
	return exe
}

// sanitized builds program and library together with a sanitizer.
func sanitized(t *testing.T, sanitizer string) string {
	t.Helper()
	return sanitizedProgram(t, sanitizer, "every", sources...)
}

// sanitizedProgram builds one of these sources; the library is built once.
func sanitizedProgram(t *testing.T, sanitizer, name string, sources ...string) (exe string) {
	t.Helper()
	exe = filepath.Join(built, name+"-"+sanitizer)
	once(t, exe, func() error { return linkSanitized(t, sanitizer, exe, sources...) })
	return exe
}

// linkSanitized builds a program, whose sources may replace files of the library.
func linkSanitized(t *testing.T, sanitizer, exe string, sources ...string) error {
	t.Helper()
	objects := filepath.Join(built, "objects-"+sanitizer)
	flags := []string{"-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=" + sanitizer, "-fno-sanitize-recover=all"}
	once(t, objects, func() error {
		_, err := tryRun("make", "-j2", "BUILD="+objects, "CFLAGS="+strings.Join(flags, " "), objects+"/libringbatch.a")
		return err
	})
	_, err := tryRun("cc", slices.Concat([]string{"-std=gnu11", "-D_GNU_SOURCE", "-I.", "-pthread", "-o", exe}, flags, sources,
		[]string{objects + "/libringbatch.a", "-ldl"})...)
	return err
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func startBroker(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "b.sock")
	b, err := broker.New(broker.Config{Socket: socket, OpenFolder: true, DrainTime: time.Second, Logger: quiet})
	must.Do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return socket
}

// execute runs a program that must print ok.
func execute(t *testing.T, env []string, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "ok\n") {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

func TestCProgramUsesEveryFunction(t *testing.T) {
	t.Parallel()
	execute(t, nil, program(t), startBroker(t), "5")
}

func TestCProgramUnderAddressSanitizer(t *testing.T) {
	t.Parallel()
	execute(t, nil, sanitized(t, "address,undefined"), startBroker(t), "3")
}

// Memory that threads of one process share; stage_test.go checks the memory between processes. (The sanitizer does not
// support a forked child with threads.)
func TestCProgramUnderThreadSanitizer(t *testing.T) {
	t.Parallel()
	execute(t, []string{"TSAN_OPTIONS=halt_on_error=1", "RB_NO_FORK=1"}, sanitized(t, "thread"), startBroker(t), "3")
}

func TestCProgramUnderValgrind(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("slow")
	}
	if _, err := exec.LookPath("valgrind"); err != nil {
		t.Skip("no valgrind here")
	}
	// A forked child loses the memory of its parent's threads.
	execute(t, []string{"RB_SLOW=1", "RB_NO_FORK=1"}, "valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full",
		"--errors-for-leak-kinds=definite",
		"--show-leak-kinds=definite", "--fair-sched=yes", program(t), startBroker(t), "1")
}

func TestTheLibraryIsLight(t *testing.T) {
	t.Parallel()
	lib := filepath.Join(library(t), "lib", "libringbatch.so")
	info, err := os.Stat(lib)
	must.Do(t, err)
	if info.Size() > 220e3 {
		t.Errorf("the shared object has %d bytes", info.Size())
	}
	needed := regexp.MustCompile(`NEEDED.*\[(.*)\]`).FindAllStringSubmatch(run(t, "readelf", "-d", lib), -1)
	for _, n := range needed {
		if !strings.HasPrefix(n[1], "libc.so") && !strings.HasPrefix(n[1], "ld-linux") && !strings.HasPrefix(n[1], "libpthread") &&
			!strings.HasPrefix(n[1], "libdl") {
			t.Errorf("it needs %s", n[1])
		}
	}
}

func TestTheCrewGathersAsALoopDoesAndCoresAndPagesAreCounted(t *testing.T) {
	t.Parallel()
	execute(t, nil, sanitizedProgram(t, "address,undefined", "crew", "testdata/crew.c"), "20")
	execute(t, []string{"TSAN_OPTIONS=halt_on_error=1"}, sanitizedProgram(t, "thread", "crew", "testdata/crew.c"), "10")
}

func TestPkgConfigAndTheStaticLibrary(t *testing.T) {
	t.Parallel()
	prefix := library(t)
	pc, err := os.ReadFile(prefix + "/lib/pkgconfig/ringbatch.pc")
	if err != nil || !strings.Contains(string(pc), "-I"+prefix+"/include") || !strings.Contains(string(pc), "-L"+prefix+"/lib") {
		t.Errorf("%v\n%s", err, pc)
	}
	exe := filepath.Join(built, "static")
	run(t, "cc", slices.Concat([]string{"-I" + prefix + "/include", "-o", exe}, sources,
		[]string{prefix + "/lib/libringbatch.a", "-pthread"})...)
	execute(t, nil, exe, startBroker(t), "1")
}

func TestEveryCompilerTakesLibraryAndFuzzers(t *testing.T) {
	t.Parallel()
	var files []string
	for _, folder := range []string{"src", "fuzz"} {
		found, err := filepath.Glob(folder + "/*.c")
		if err != nil || len(found) == 0 {
			t.Fatal(folder, err)
		}
		files = append(files, found...)
	}
	for _, compiler := range []string{"cc", "clang"} {
		if _, err := exec.LookPath(compiler); err == nil {
			run(t, compiler, slices.Concat([]string{"-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-Werror",
				"-pthread", "-fsyntax-only"}, files)...)
		}
	}
}

func TestEveryFunctionOfTheHeaderIsUsedAndExported(t *testing.T) {
	t.Parallel()
	all := func(files ...string) (together []byte) {
		for _, file := range files {
			text, err := os.ReadFile(file)
			must.Do(t, err)
			together = append(together, text...)
		}
		return together
	}
	header := all("ringbatch.h", "ringbatch_weights.h", "ringbatch_cuda.h")
	source := all(append(sources, "testdata/device.c", "testdata/weights.c")...)
	symbols := run(t, "nm", "-D", "--defined-only", filepath.Join(library(t), "lib", "libringbatch.so"))
	functions := regexp.MustCompile(`(?m)^RB_API [^(]*?\*?(rb_\w+)\(`).FindAllStringSubmatch(string(header), -1)
	if len(functions) < 80 {
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

// Files that call one another must be read together.
func TestNoFilesOfTheLibraryCallOneAnother(t *testing.T) {
	t.Parallel()
	library(t)
	objects, err := filepath.Glob(filepath.Join(built, "objects", "*.o"))
	if err != nil || len(objects) == 0 {
		t.Fatal(objects, err)
	}
	symbols := regexp.MustCompile(`(?m)([A-Z]) (rb_\w+)$`)
	defines, calls := map[string]string{}, map[string][]string{} // by symbol: its file; by file: symbols
	for _, o := range objects {
		for _, s := range symbols.FindAllStringSubmatch(run(t, "nm", o), -1) {
			if s[1] == "U" {
				calls[o] = append(calls[o], s[2])
			} else {
				defines[s[2]] = o
			}
		}
	}
	var path []string
	done := map[string]bool{}
	var walk func(o string)
	walk = func(o string) {
		if i := slices.Index(path, o); i >= 0 {
			t.Fatalf("a circle: %v", path[i:])
		}
		path = append(path, o)
		for _, s := range calls[o] {
			if to := defines[s]; to != "" && !done[to] {
				walk(to)
			}
		}
		path, done[o] = path[:len(path)-1], true
	}
	for _, o := range objects {
		walk(o)
	}
}

func TestTheHeaderHasEveryDType(t *testing.T) {
	t.Parallel()
	header, err := os.ReadFile("ringbatch.h")
	must.Do(t, err)
	for d := tensor.Bool; d <= tensor.F64; d++ {
		if !strings.Contains(string(header), "RB_"+strings.ToUpper(d.String())) {
			t.Errorf("dtype %s is not in the header", d)
		}
	}
}
