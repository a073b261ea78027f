// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"bufio"
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("no %s here: this language is not tested", program)
	}
}

func TestOldCxxIncludesTheHeaders(t *testing.T) {
	t.Parallel()
	need(t, "c++")
	source := filepath.Join(built, "header.cc")
	text := "#include <ringbatch_weights.h>\n#include <ringbatch_cuda.h>\n" +
		"int main() { return rb_abi_version() == RB_ABI_VERSION ? 0 : 1; }\n"
	must.Do(t, os.WriteFile(source, []byte(text), 0o600))
	prefix, exe := library(t), filepath.Join(built, "cxx")
	run(t, "c++", "-Wall", "-Wextra", "-Werror", "-pedantic", "-std=c++11", "-I"+prefix+"/include", "-o", exe, source, "-L"+prefix+"/lib",
		"-lringbatch", "-Wl,-rpath,"+prefix+"/lib")
	run(t, exe)
}

// cxx compiles testdata/client.cc, which has the client and the worker, and runs it.
func cxx(t *testing.T, name string, flags ...string) {
	t.Helper()
	need(t, "c++")
	prefix, exe := library(t), filepath.Join(built, name)
	run(t, "c++", slices.Concat([]string{"-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g"}, flags, []string{"-I" + prefix +
		"/include", "-o", exe, "testdata/client.cc", "-L" + prefix + "/lib", "-lringbatch", "-pthread", "-Wl,-rpath," + prefix + "/lib"})...)
	execute(t, nil, exe, startBroker(t))
}

func TestCxxWithExceptions(t *testing.T) {
	t.Parallel()
	cxx(t, "cxx-throws", "-fsanitize=address,undefined")
}

func TestCxxWithoutExceptions(t *testing.T) {
	t.Parallel()
	cxx(t, "cxx-returns", "-fno-exceptions", "-fno-rtti")
}

func TestCMakeFindsThePackage(t *testing.T) {
	t.Parallel()
	need(t, "cmake")
	need(t, "c++")
	prefix, folder := library(t), t.TempDir()
	client, err := filepath.Abs("testdata/client.cc")
	must.Do(t, err)
	text := `cmake_minimum_required(VERSION 3.13)
project(example CXX)
find_package(ringbatch 99 QUIET)
if(ringbatch_FOUND)
  message(FATAL_ERROR "this is no version 99")
endif()
find_package(ringbatch 0.1 REQUIRED)
foreach(kind ringbatch static)
  add_executable(${kind} ` + client + `)
  target_compile_features(${kind} PRIVATE cxx_std_17)
  target_link_libraries(${kind} ringbatch::${kind} Threads::Threads)
endforeach()
`
	must.Do(t, os.WriteFile(folder+"/CMakeLists.txt", []byte(text), 0o600))
	run(t, "cmake", "-S", folder, "-B", folder+"/build", "-DCMAKE_PREFIX_PATH="+prefix)
	run(t, "cmake", "--build", folder+"/build")
	for _, kind := range []string{"ringbatch", "static"} {
		execute(t, nil, folder+"/build/"+kind, startBroker(t))
	}
}

func TestThePackageHasWhatMakeInstalls(t *testing.T) {
	t.Parallel()
	library(t)
	stage := t.TempDir()
	run(t, "make", "install", "BUILD="+filepath.Join(built, "objects"), "PREFIX=/usr", "LIBDIR=/usr/lib", "DESTDIR="+stage)
	recipe, err := os.ReadFile("../deploy/packaging/nfpm-dev.yaml")
	must.Do(t, err)
	files := strings.NewReplacer("@LIBDIR@", "/usr/lib", "@ABI@", "1").Replace(string(recipe))
	must.Do(t, filepath.WalkDir(stage, func(path string, e fs.DirEntry, err error) error {
		if name := strings.TrimPrefix(path, stage); err == nil && !e.IsDir() && !strings.Contains(files, name) {
			t.Errorf("deploy/packaging/nfpm-dev.yaml does not have %s", name)
		}
		return err
	}))
}

// echo serves a model whose outputs are its inputs.
func echo(t *testing.T, socket, model, kind string) {
	t.Helper()
	sig, err := tensor.ParseSignature([]string{"x:" + kind}, []string{"y:" + kind})
	must.Do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = worker.Serve(ctx, worker.Config{Model: model, Signature: sig, Socket: socket}, func(_ context.Context, b *worker.Batch) error {
			for i := range b.Rows() {
				copy(b.Output(0).Bytes(i), b.Input(0).Bytes(i))
			}
			return nil
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	c, err := client.Dial(ctx, model, client.WithSocket(socket), client.WaitForModel())
	must.Do(t, err)
	c.Close()
}

func TestAFortranProgram(t *testing.T) {
	t.Parallel()
	need(t, "gfortran")
	prefix, folder := library(t), t.TempDir()
	run(t, "gfortran", "-std=f2018", "-Wall", "-Werror", "-fcheck=all", "-J", folder, "-o", folder+"/client", prefix+"/include/ringbatch.f90",
		"testdata/client.f90", "-L"+prefix+"/lib", "-lringbatch", "-Wl,-rpath,"+prefix+"/lib")
	socket := startBroker(t)
	echo(t, socket, "echo", "f32[16]")
	echo(t, socket, "words", "str[<=8]")
	execute(t, nil, folder+"/client", socket)
}

// The example's first comment has the commands of a user. The library is installed already.
func TestTheRustExamplesCommands(t *testing.T) {
	t.Parallel()
	need(t, "rustc")
	example, err := os.Open("../examples/rust/client.rs")
	must.Do(t, err)
	defer example.Close()
	prefix, commands := library(t), []string(nil)
	for lines := bufio.NewScanner(example); lines.Scan(); {
		if command, found := strings.CutPrefix(lines.Text(), "//!     "); found && !strings.HasPrefix(command, "make") {
			commands = append(commands, command)
		}
	}
	home := t.TempDir()
	must.Do(t, os.Symlink(prefix, home+"/.local"))
	must.Do(t, os.CopyFS(home+"/examples", os.DirFS("../examples")))
	must.Do(t, os.Mkdir(home+"/client", 0o755)) // a clone has this folder, too
	socket := startBroker(t)
	echo(t, socket, "echo", "f32[16]")
	rustup, err := os.UserHomeDir()
	must.Do(t, err)
	execute(t, []string{"RINGBATCH_SOCKET=" + socket, "RUSTUP_HOME=" + rustup + "/.rustup", "HOME=" + home},
		"sh", "-ec", "cd "+home+"\n"+strings.Join(commands, "\n"))
}
