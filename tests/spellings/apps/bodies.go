// How Go reads a body. Arguments: NAME=PORT for each. A rejected body is answered with 400.
package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"mime"
	"net/http"
	"os"
	"strings"
	"unicode/utf8"
)

type call struct {
	Model     *string `json:"model"`
	Method    *string `json:"method"`
	MaxTokens *int64  `json:"max_tokens"`
	Params    *params `json:"params"`
}

type params struct {
	Name *string `json:"name"`
}

type found map[string]any

var names = []string{"model", "method", "max_tokens"}
var readers = map[string]func(*http.Request) (found, error){
	"go-map":    decodeMap,
	"go-struct": decodeStruct,
	"go-form":   readForm,
}

func shown(value any) any {
	switch value := value.(type) {
	case string:
		if !utf8.ValidString(value) {
			return found{"b": hex.EncodeToString([]byte(value))}
		}
		return value
	case json.Number:
		return number(value.String())
	case float64:
		return number(big.NewFloat(value).Text('g', -1))
	case []any:
		return found{"t": "list"}
	case map[string]any:
		return found{"t": "object"}
	}
	return value
}

func number(text string) any {
	if len(text) > 300 {
		return found{"n": "very long"}
	}
	value, ok := new(big.Float).SetPrec(4096).SetString(text)
	if !ok || value.IsInf() || value.MantExp(nil) > 2000 {
		return found{"n": "very long"}
	}
	if value.IsInt() {
		whole, _ := value.Int(nil)
		return found{"n": whole.String()}
	}
	return found{"n": text}
}

func fields(root map[string]any) found {
	answer := found{}
	for _, name := range names {
		if value, ok := root[name]; ok {
			answer[name] = shown(value)
		}
	}
	if inner, ok := root["params"].(map[string]any); ok {
		if value, ok := inner["name"]; ok {
			answer["name"] = shown(value)
		}
	}
	return answer
}

// json.Decoder reads the first document only, as most handlers do.
func decodeMap(r *http.Request) (found, error) {
	decoder := json.NewDecoder(r.Body)
	decoder.UseNumber()
	var root map[string]any
	err := decoder.Decode(&root)
	return fields(root), err
}

func decodeStruct(r *http.Request) (found, error) {
	var one call
	err := json.NewDecoder(r.Body).Decode(&one)
	return one.fields(), err
}

func (one call) fields() found {
	answer := found{}
	if one.Model != nil {
		answer["model"] = shown(*one.Model)
	}
	if one.Method != nil {
		answer["method"] = shown(*one.Method)
	}
	if one.MaxTokens != nil {
		answer["max_tokens"] = found{"n": big.NewInt(*one.MaxTokens).String()}
	}
	if one.Params != nil && one.Params.Name != nil {
		answer["name"] = shown(*one.Params.Name)
	}
	return answer
}

func readForm(r *http.Request) (found, error) {
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if !strings.Contains(kind, "form") {
		return nil, errors.New("no form")
	}
	if err := r.ParseMultipartForm(1 << 24); err != nil && err != http.ErrNotMultipart {
		return nil, err
	}
	answer := found{}
	for _, name := range names {
		if values, ok := r.PostForm[name]; ok {
			answer[name] = shown(values[0])
		}
	}
	return answer, nil
}

func serve(name, port string) {
	http.ListenAndServe("127.0.0.1:"+port, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, err := readers[name](r)
		io.Copy(io.Discard, r.Body)
		if err != nil {
			w.WriteHeader(400)
			io.WriteString(w, err.Error())
			return
		}
		json.NewEncoder(w).Encode(answer)
	}))
}

func main() {
	for _, argument := range os.Args[1:] {
		name, port, _ := strings.Cut(argument, "=")
		go serve(name, port)
	}
	select {}
}
