// Package repotest keeps the rules of this repository that no compiler checks, as ordinary tests: which package may
// import which, where gRPC codes and HTTP statuses are known, that every package says what it is for.
//
// Why not a linter: depguard and its like know single imports, while these rules are about the place of a package in the
// whole, and a linter runs only where it is installed. A test runs wherever the code does and fails with the file, the
// line and the way out.
//
// To add a rule, write a function from the parsed tree to problems, list it in rules, and give it one source that
// breaks it and one that does not: a rule that cannot fail guards nothing.
package repotest
