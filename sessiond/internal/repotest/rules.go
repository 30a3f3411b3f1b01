package repotest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const module = "github.com/sessiond/sessiond"

// A rule looks at the whole tree and returns one line for each place that breaks it.
type rule struct {
	name  string
	check func(*tree) []string
}

var rules = []rule{
	{"directions", checkDirections},
	{"harness", checkHarness},
	{"etcd", checkEtcd},
	{"codes", checkCodes},
	{"http-status", checkHTTPStatus},
	{"package-docs", checkPackageDocs},
	{"init", checkInit},
	{"sleep", checkSleep},
	{"names", checkNames},
	{"outside", checkOutside},
	{"promises", checkPromises},
}

// A tree is the repository: its Go files parsed, its other files as text.
type tree struct {
	fset *token.FileSet
	src  map[string]string // By path from the root, with slashes.
	gos  []*goFile         // In the order of their paths.
}

// A goFile is one file of ours; files of other modules in the tree are not among them.
type goFile struct {
	*ast.File
	path, dir string
	test      bool // *_test.go
	generated bool
}

// parse makes a tree of sources by their path from the root.
func parse(src map[string]string) (*tree, error) {
	t := &tree{fset: token.NewFileSet(), src: src}
	for _, p := range slices.Sorted(maps.Keys(src)) {
		if path.Ext(p) != ".go" || strings.Contains("/"+p, "/testdata/") {
			continue // What go build leaves out, for it need not even parse.
		}
		f, err := parser.ParseFile(t.fset, p, src[p], parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		t.gos = append(t.gos, &goFile{
			File:      f,
			path:      p,
			dir:       path.Dir(p),
			test:      strings.HasSuffix(p, "_test.go"),
			generated: ast.IsGenerated(f),
		})
	}
	return t, nil
}

// at puts the place of a node before a message.
func (t *tree) at(n ast.Node, format string, args ...any) string {
	p := t.fset.Position(n.Pos())
	return fmt.Sprintf("%s:%d: %s", p.Filename, p.Line, fmt.Sprintf(format, args...))
}

// within says whether p is one of the folders or lies in one.
func within(p string, folders ...string) bool {
	return slices.ContainsFunc(folders, func(folder string) bool {
		return p == folder || strings.HasPrefix(p, folder+"/")
	})
}

// harness says whether a folder holds code that only tests, benchmarks and demonstrations run.
func harness(dir string) bool {
	return within(dir, "sessiond/sessiondtest", "sessiond/internal/storetest", "sessiond/e2e", "sessiond/chaos", "sessiond/bench")
}

// cmd says whether a folder holds a program, which may put together what libraries may not.
func cmd(dir string) bool {
	return within(dir, "sessiond/cmd", "mcpserver/cmd", "client/cmd")
}

// imports returns the imports of a file by the path that they name.
func (f *goFile) imports() map[string]*ast.ImportSpec {
	specs := make(map[string]*ast.ImportSpec, len(f.Imports))
	for _, spec := range f.Imports {
		if p, err := strconv.Unquote(spec.Path.Value); err == nil {
			specs[p] = spec
		}
	}
	return specs
}

// uses returns the selectors in a file that take from the package imported as importPath a name that match accepts.
func (f *goFile) uses(importPath string, match func(name string) bool) []*ast.SelectorExpr {
	spec, ok := f.imports()[importPath]
	if !ok {
		return nil
	}
	local := path.Base(importPath)
	if spec.Name != nil {
		local = spec.Name.Name
	}
	var found []*ast.SelectorExpr
	ast.Inspect(f.File, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == local && match(sel.Sel.Name) {
				found = append(found, sel)
			}
		}
		return true
	})
	return found
}

// checkImports reports the imports of non-test files for which refuse gives a reason.
func (t *tree) checkImports(refuse func(f *goFile, importPath string) string) []string {
	var problems []string
	for _, f := range t.gos {
		if f.test {
			continue
		}
		imports := f.imports()
		for _, p := range slices.Sorted(maps.Keys(imports)) {
			if reason := refuse(f, p); reason != "" {
				problems = append(problems, t.at(imports[p], "imports %s: %s", p, reason))
			}
		}
	}
	return problems
}

// checkDirections keeps the layers apart. Programs and tests may cross over.
func checkDirections(t *tree) []string {
	layers := []struct {
		folder string
		may    []string // Besides itself.
	}{
		{"proto", nil},
		{"client", []string{"proto"}},
		{"mcpserver", []string{"client", "proto"}},
		{"sessiond", []string{"proto"}},
	}
	return t.checkImports(func(f *goFile, p string) string {
		ours, ok := strings.CutPrefix(p, module+"/")
		if !ok || cmd(f.dir) || harness(f.dir) {
			return ""
		}
		for _, l := range layers {
			if within(f.dir, l.folder) && !within(ours, append(l.may, l.folder)...) {
				if l.may == nil {
					return l.folder + " imports none of our packages"
				}
				return fmt.Sprintf("of our packages, %s imports only %s", l.folder, strings.Join(l.may, " and "))
			}
		}
		return ""
	})
}

// checkHarness keeps what kills, pauses and cuts out of what users run.
func checkHarness(t *tree) []string {
	return t.checkImports(func(f *goFile, p string) string {
		if ours, ok := strings.CutPrefix(p, module+"/"); ok && harness(ours) && !harness(f.dir) {
			return "it is for tests only"
		}
		return ""
	})
}

// checkEtcd keeps the storage replaceable, and its traps known in one place.
func checkEtcd(t *tree) []string {
	return t.checkImports(func(f *goFile, p string) string {
		if within(p, "go.etcd.io") &&
			!within(f.dir, "sessiond/internal/etcdstore", "sessiond/internal/etcdnode") && !harness(f.dir) {
			return "only sessiond/internal/etcdstore and sessiond/internal/etcdnode know etcd"
		}
		return ""
	})
}

// checkCodes keeps each direction of the error map in one file, where a round-trip test covers it whole.
func checkCodes(t *tree) []string {
	return t.checkImports(func(f *goFile, p string) string {
		if within(p, "google.golang.org/grpc/codes", "google.golang.org/grpc/status") &&
			path.Base(f.path) != "status.go" && !f.generated && !harness(f.dir) {
			return "only status.go knows gRPC codes; use a sentinel error and let status.go translate it"
		}
		return ""
	})
}

// checkHTTPStatus keeps the table of answers in the one file that documents it.
func checkHTTPStatus(t *tree) []string {
	var problems []string
	for _, f := range t.gos {
		if !within(f.dir, "mcpserver") || cmd(f.dir) || f.test || f.path == "mcpserver/errors.go" {
			continue
		}
		for _, sel := range f.uses("net/http", func(name string) bool { return strings.HasPrefix(name, "Status") }) {
			problems = append(problems, t.at(sel, "http.%s: only mcpserver/errors.go knows HTTP statuses", sel.Sel.Name))
		}
	}
	return problems
}

// checkPackageDocs wants one doc comment a package; one of tests alone has it in a test file.
func checkPackageDocs(t *tree) []string {
	type pkg struct {
		first              *goFile
		documented, inTest bool
	}
	byDir := map[string]*pkg{}
	for _, f := range t.gos {
		p := byDir[f.dir]
		if p == nil || p.inTest && !f.test {
			p = &pkg{first: f, inTest: f.test}
			byDir[f.dir] = p
		}
		if p.inTest == f.test && strings.TrimSpace(f.Doc.Text()) != "" {
			p.documented = true
		}
	}
	var problems []string
	for _, dir := range slices.Sorted(maps.Keys(byDir)) {
		if p := byDir[dir]; !p.documented {
			problems = append(problems, t.at(p.first.Name,
				"package %s has no doc comment: say what it is for and why not the obvious alternative "+
					"(beside generated files: in a doc.go)", p.first.Name.Name))
		}
	}
	return problems
}

// checkInit keeps importing free of effects: what a package needs is passed in.
func checkInit(t *tree) []string {
	var problems []string
	for _, f := range t.gos {
		if f.generated {
			continue
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				problems = append(problems, t.at(fn, "func init: call it from where it is needed, or pass the value in"))
			}
		}
	}
	return problems
}

// checkSleep keeps tests from waiting by guess. In a synctest bubble a sleep costs nothing and is exact; whether one stands
// inside the bubble is for review, that the file has bubbles is checked here.
func checkSleep(t *tree) []string {
	var problems []string
	for _, f := range t.gos {
		if _, bubbles := f.imports()["testing/synctest"]; bubbles || !f.test && !harness(f.dir) {
			continue
		}
		for _, sel := range f.uses("time", func(name string) bool { return name == "Sleep" }) {
			problems = append(problems, t.at(sel, "time.Sleep outside of a synctest bubble: wait for the event itself"))
		}
	}
	return problems
}

// checkNames refuses names that say nothing: such a package is two packages.
func checkNames(t *tree) []string {
	var problems []string
	for _, f := range t.gos {
		name := strings.ToLower(f.Name.Name)
		if strings.Contains(name, "util") || strings.Contains(name, "common") {
			problems = append(problems, t.at(f.Name, "package %s: name it after what it does", f.Name.Name))
		}
	}
	return problems
}

// checkOutside refuses references to a folder beside the repository, which a reader of a clone does not have.
func checkOutside(t *tree) []string {
	outside := strings.Join([]string{"..", "shared"}, "/")
	var problems []string
	for _, p := range slices.Sorted(maps.Keys(t.src)) {
		for i, line := range slices.Collect(strings.Lines(t.src[p])) {
			if strings.Contains(line, outside) {
				problems = append(problems, fmt.Sprintf("%s:%d: refers to %s, which is not in the repository", p, i+1, outside))
			}
		}
	}
	return problems
}

var (
	promisePattern = regexp.MustCompile(`(?m)^- \*\*([A-Z]+[0-9]+)\*\* `)
	// A test and, in parentheses, the file or the folder in which it is; the file may be on the next line.
	namedPattern = regexp.MustCompile("`(Test[A-Z0-9]\\w*)`(?:\\s+\\(([\\w./-]+(?:/[\\w.-]+|\\.go))\\))?")
)

// checkPromises keeps the lists of promises honest: each names a test that exists, where it says, or what is not there yet.
func checkPromises(t *tree) []string {
	where := map[string][]string{} // the files that have a test of the name
	for _, f := range t.gos {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") {
				where[fn.Name.Name] = append(where[fn.Name.Name], f.path)
			}
		}
	}
	var problems []string
	for _, p := range slices.Sorted(maps.Keys(t.src)) {
		if path.Base(p) != "PROMISES.md" {
			continue
		}
		src := t.src[p]
		for _, m := range namedPattern.FindAllStringSubmatch(src, -1) {
			name, place := m[1], m[2]
			switch files := where[name]; {
			case len(files) == 0:
				problems = append(problems, fmt.Sprintf("%s: there is no %s", p, name))
			case place != "" && !slices.ContainsFunc(files, func(file string) bool {
				return within(file, place, path.Join(path.Dir(p), place))
			}):
				problems = append(problems, fmt.Sprintf("%s: there is no %s in %s", p, name, place))
			}
		}
		starts := promisePattern.FindAllStringSubmatchIndex(src, -1)
		for i, at := range starts {
			text := src[at[0]:]
			if i+1 < len(starts) {
				text = src[at[0]:starts[i+1][0]]
			}
			if !namedPattern.MatchString(text) && !strings.Contains(text, "*Not yet") {
				problems = append(problems, fmt.Sprintf("%s: %s names neither a test nor what is not there yet", p, src[at[2]:at[3]]))
			}
		}
	}
	return problems
}
