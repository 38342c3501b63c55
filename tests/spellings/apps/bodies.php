<?php
// How PHP reads a body: /json as JSON, /form as a form. A rejected body is answered with 400.
function shown($value) {
    if (is_string($value)) return mb_or_bytes($value);
    if (is_int($value)) return ['n' => (string) $value];
    if (is_float($value)) {
        if (is_infinite($value) || is_nan($value)) return ['n' => is_nan($value) ? 'NaN' : 'Infinity'];
        return ['n' => floor($value) == $value ? number_format($value, 0, '', '') : (string) $value];
    }
    if (is_array($value)) return ['t' => array_is_list($value) && $value ? 'list' : 'object'];
    return $value;
}
function mb_or_bytes($text) { return preg_match('//u', $text) ? $text : ['b' => bin2hex($text)]; }
function fields($root) {
    $found = [];
    if (!is_array($root)) return $found;
    foreach (['model', 'method', 'max_tokens'] as $name) {
        if (array_key_exists($name, $root)) $found[$name] = shown($root[$name]);
    }
    if (isset($root['params']) && is_array($root['params']) && array_key_exists('name', $root['params'])) {
        $found['name'] = shown($root['params']['name']);
    }
    return $found;
}
if (str_starts_with($_SERVER['REQUEST_URI'], '/json')) {
    $root = json_decode(file_get_contents('php://input'), true);
    $is_read = json_last_error() === JSON_ERROR_NONE;
} else {
    $root = $_POST;
    $is_read = stripos($_SERVER['CONTENT_TYPE'] ?? '', 'form') !== false;
}
http_response_code($is_read ? 200 : 400);
echo json_encode((object) fields($root));
