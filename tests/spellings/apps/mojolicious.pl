# Mojolicious. Run by its own daemon.
use Mojolicious::Lite -signatures;
use MIME::Base64;

app->mode('production');
app->log->level('fatal');

my $read_user = sub ($c) {
    my $header = $c->req->headers->authorization // '';
    return $1 if $header =~ /^Bearer\s+(\S+)$/i;
    return (split /:/, decode_base64($1))[0] if $header =~ /^Basic\s+(\S+)$/i;
    return undef;
};

get '/login' => sub ($c) { $c->render(json => {handler => 'login'}) };
get '/login/:user' => sub ($c) { $c->render(json => {handler => 'account', user => $c->param('user')}) };
get '/admin/*rest' => sub ($c) { $c->render(json => {handler => 'admin'}) };
get '/public/*rest' => sub ($c) { $c->render(json => {handler => 'public'}) };
get '/healthz' => sub ($c) { $c->render(json => {handler => 'healthz'}) };
get '/search' => sub ($c) {
    $c->render(json => {
        handler => 'search',
        session => $c->cookie('session'),
        api_key => $c->req->query_params->param('api_key'),
        authorization => $read_user->($c),
        x_user => $c->req->headers->header('X-User'),
        host => $c->req->url->to_abs->host,
    });
};

app->start;
