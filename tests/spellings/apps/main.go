// Go's net/http with ServeMux. Argument: the port.
//
// The handlers are login, account (/login/{user}), admin, public, healthz and search. Each answers with its name and
// the values that it read.
package main

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
)

func handle(name string, read func(*http.Request) map[string]any) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		values := map[string]any{}
		if read != nil {
			values = read(request)
		}
		values["handler"] = name
		json.NewEncoder(response).Encode(values)
	}
}

func account(request *http.Request) map[string]any {
	return map[string]any{"user": strings.TrimPrefix(request.URL.Path, "/login/")}
}

func search(request *http.Request) map[string]any {
	values := map[string]any{"api_key": nil, "session": nil}
	if query := request.URL.Query(); query.Has("api_key") {
		values["api_key"] = query.Get("api_key")
	}
	if user, _, ok := request.BasicAuth(); ok {
		values["authorization"] = user
	} else if header := request.Header.Get("Authorization"); len(header) > 7 && strings.EqualFold(header[:7], "Bearer ") {
		values["authorization"] = strings.TrimSpace(header[7:])
	}
	values["x_user"], values["host"] = request.Header.Get("X-User"), request.Host
	if cookie, err := request.Cookie("session"); err == nil {
		values["session"] = cookie.Value
	}
	return values
}

func main() {
	routes := http.NewServeMux()
	routes.Handle("/login", handle("login", nil))
	routes.Handle("/login/", handle("account", account))
	routes.Handle("/admin/", handle("admin", nil))
	routes.Handle("/public/", handle("public", nil))
	routes.Handle("/healthz", handle("healthz", nil))
	routes.Handle("/search", handle("search", search))
	panic(http.ListenAndServe("127.0.0.1:"+os.Args[1], routes))
}
