<?php
// PHP with parse_url, as routers without a framework do. `php -S` runs this file for every request.
$path = rawurldecode((string) parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH));
$answer = null;
if ($path === '/login') {
    $answer = ['handler' => 'login'];
} elseif (preg_match('#^/login/([^/]+)$#D', $path, $match)) {
    $answer = ['handler' => 'account', 'user' => $match[1]];
} elseif (str_starts_with($path, '/admin/')) {
    $answer = ['handler' => 'admin'];
} elseif (str_starts_with($path, '/public/')) {
    $answer = ['handler' => 'public'];
} elseif ($path === '/healthz') {
    $answer = ['handler' => 'healthz'];
} elseif ($path === '/search') {
    $session = $_COOKIE['session'] ?? null;
    $key = $_GET['api_key'] ?? null;
    $key = is_array($key) ? reset($key) : $key;
    $header = $_SERVER['HTTP_AUTHORIZATION'] ?? '';
    $token = preg_match('/^Bearer\s+(\S+)/i', $header, $match) ? $match[1] : null;
    if (preg_match('/^Basic\s+(.*)$/i', $header, $match)) {
        $token = explode(':', base64_decode($match[1]))[0];
    }
    $answer = ['handler' => 'search', 'session' => $session, 'api_key' => $key, 'authorization' => $token];
    $answer += ['x_user' => $_SERVER['HTTP_X_USER'] ?? null, 'host' => $_SERVER['HTTP_HOST'] ?? null];
}
http_response_code($answer ? 200 : 404);
echo json_encode($answer ?? new stdClass(), JSON_INVALID_UTF8_SUBSTITUTE);
