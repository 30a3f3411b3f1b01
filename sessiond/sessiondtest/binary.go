package sessiondtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// BinDir is the environment variable with the folder that has the programs: etcd, sessiond, mcpserver.
const BinDir = "E2E_BIN_DIR"

// Binary gives the path of a program in the folder that [BinDir] names.
func Binary(name string) (string, error) {
	dir := os.Getenv(BinDir)
	if dir == "" {
		return "", errors.New(BinDir + " is not set: run make e2e, or set it to a folder with etcd, sessiond and mcpserver")
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err != nil {
		return "", err
	}
	if fi, err := os.Stat(path); err != nil || fi.IsDir() || fi.Mode()&0o111 == 0 {
		return "", fmt.Errorf("no program %s in %s=%s: run make e2e, which builds it", name, BinDir, dir)
	}
	return path, nil
}
