# Dancer2 and Plack. Run by Starman.
use Dancer2;
use MIME::Base64;

set serializer => 'JSON';
set logger => 'Null';
set show_errors => 0;

sub read_user {
    my $header = request->header('Authorization') // '';
    return $1 if $header =~ /^Bearer\s+(\S+)$/i;
    return (split /:/, decode_base64($1))[0] if $header =~ /^Basic\s+(\S+)$/i;
    return undef;
}

get '/login' => sub { {handler => 'login'} };
get '/login/:user' => sub { {handler => 'account', user => route_parameters->get('user')} };
get '/admin/**' => sub { {handler => 'admin'} };
get '/public/**' => sub { {handler => 'public'} };
get '/healthz' => sub { {handler => 'healthz'} };
get '/search' => sub {
    my $cookie = cookies->{session};
    my $host = (request->host // '') =~ s/:\d*$//r;
    return {
        handler => 'search',
        session => $cookie && scalar $cookie->value,
        api_key => scalar query_parameters->get('api_key'),
        authorization => read_user(),
        x_user => scalar request->header('X-User'),
        host => $host,
    };
};

to_app;
