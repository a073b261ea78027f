// SPDX-License-Identifier: Apache-2.0

// Package walls tests rules about several packages: layers, public signatures, the folder map.
package walls

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// public are the packages that users of the module import.
var public = []string{"tensor", "status", "policy", "admin", "admin/stats", "admin/alias", "client", "client/ringbatchtest", "worker", "broker",
	"broker/supervise"}

// A user can neither name nor make a type of an internal package. Package shm promises
// programs nothing.
func TestNoPublicSignatureHasAnInternalType(t *testing.T) {
	for _, pkg := range public {
		files, err := filepath.Glob(filepath.Join("../..", pkg, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("package %s: %d files, %v", pkg, len(files), err)
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, path, nil, 0)
			must.Do(t, err)
			internal := map[string]bool{} // by the name that the file uses
			for _, spec := range file.Imports {
				if full, _ := strconv.Unquote(spec.Path.Value); strings.Contains(full, "/internal/") || strings.HasSuffix(full, "/shm") {
					name := full[strings.LastIndexByte(full, '/')+1:]
					if spec.Name != nil {
						name = spec.Name.Name
					}
					internal[name] = true
				}
			}
			for _, part := range exportedParts(file) {
				ast.Inspect(part, func(n ast.Node) bool {
					switch n := n.(type) {
					case *ast.SelectorExpr:
						if pkg, ok := n.X.(*ast.Ident); ok && internal[pkg.Name] {
							t.Errorf("%s: %s.%s in a public signature", fset.Position(n.Pos()), pkg.Name, n.Sel.Name)
						}
					case *ast.Field: // unexported fields and methods may have internal types
						return len(n.Names) == 0 || n.Names[0].IsExported()
					case *ast.BlockStmt:
						return false
					}
					return true
				})
			}
		}
	}
}

// exportedParts are the syntax that a user sees: types, and the
// parameters and results of functions and methods.
func exportedParts(file *ast.File) (parts []ast.Node) {
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if !d.Name.IsExported() || d.Recv != nil && !receiverIsExported(d.Recv.List[0].Type) {
				continue
			}
			for _, list := range []*ast.FieldList{d.Type.Params, d.Type.Results} {
				if list != nil {
					for _, f := range list.List {
						parts = append(parts, f.Type)
					}
				}
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					if s.Name.IsExported() {
						parts = append(parts, s.Type)
					}
				case *ast.ValueSpec:
					if s.Names[0].IsExported() && s.Type != nil {
						parts = append(parts, s.Type)
					}
				}
			}
		}
	}
	return parts
}

func receiverIsExported(e ast.Expr) bool {
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return false
		}
	}
}

// The engine knows no socket and no configuration.
func TestTheEngineImportsNeitherSocketsNorConfiguration(t *testing.T) {
	files, err := filepath.Glob("../../broker/engine/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		must.Do(t, err)
		for _, spec := range file.Imports {
			switch full, _ := strconv.Unquote(spec.Path.Value); strings.TrimPrefix(full, "github.com/ringbatch/ringbatch/") {
			case "net", "internal/control", "internal/attach", "broker", "broker/configfile", "broker/supervise":
				t.Errorf("%s imports %s", path, full)
			}
		}
	}
}
