package mcpserver

import (
	"net/http"
	"slices"
	"strings"
)

// What browser clients of the allowed origins may do (N4).
var (
	corsMethods = strings.Join([]string{http.MethodGet, http.MethodPost, http.MethodDelete}, ", ")
	corsAllowed = strings.Join([]string{
		"Content-Type", "Accept", "Authorization", headerSessionID, headerRevision, headerEventID, "Mcp-Method", "Mcp-Name",
	}, ", ")
	corsExposed = strings.Join([]string{headerSessionID, headerRevision, "Www-Authenticate", "Retry-After"}, ", ")
)

// cors tells a browser that its page may read the answer, if its origin is configured. It reports whether the request was a
// pre-flight, which is answered then.
func (h *Handler) cors(w http.ResponseWriter, r *http.Request) bool {
	if len(h.opts.AllowedOrigins) == 0 {
		return false
	}
	header := w.Header()
	header.Add("Vary", "Origin")
	origin := r.Header.Get("Origin")
	if !slices.Contains(h.opts.AllowedOrigins, origin) {
		return false
	}
	header.Set("Access-Control-Allow-Origin", origin)
	header.Set("Access-Control-Expose-Headers", corsExposed)
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	header.Set("Access-Control-Allow-Methods", corsMethods)
	header.Set("Access-Control-Allow-Headers", corsAllowed)
	header.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(statusNoContent)
	return true
}
