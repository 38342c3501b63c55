// encoding/json/v2, which Go has since 1.25 with GOEXPERIMENT=jsonv2.
package main

import (
	"encoding/json/v2"
	"net/http"
)

func init() {
	readers["go-v2-map"] = func(r *http.Request) (found, error) {
		var root map[string]any
		err := json.UnmarshalRead(r.Body, &root)
		return fields(root), err
	}
	readers["go-v2-struct"] = func(r *http.Request) (found, error) { return decodeV2(r) }
	readers["go-v2-no-case"] = func(r *http.Request) (found, error) {
		return decodeV2(r, json.MatchCaseInsensitiveNames(true))
	}
}

func decodeV2(r *http.Request, options ...json.Options) (found, error) {
	var one call
	err := json.UnmarshalRead(r.Body, &one, options...)
	return one.fields(), err
}
