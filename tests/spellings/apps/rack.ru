# Rack without a framework. Run by WEBrick.
require 'json'

run lambda { |env|
  request = Rack::Request.new(env)
  path = Rack::Utils.unescape_path(request.path_info)
  answer =
    case path
    when '/login' then { handler: 'login' }
    when %r{\A/login/([^/]+)\z} then { handler: 'account', user: $1.scrub }
    when %r{\A/admin/} then { handler: 'admin' }
    when %r{\A/public/} then { handler: 'public' }
    when '/healthz' then { handler: 'healthz' }
    when '/search'
      key = request.params['api_key']
      values = { session: request.cookies['session'], api_key: key, x_user: env['HTTP_X_USER'], host: request.host }
      words = env['HTTP_AUTHORIZATION'].to_s.split
      values[:authorization] = words[1] if words.size == 2 && words[0].downcase == 'bearer'
      values[:authorization] = words[1].unpack1('m').split(':')[0] if words.size == 2 && words[0].downcase == 'basic'
      { handler: 'search' }.update(values.transform_values { |value| value.is_a?(String) ? value.scrub : nil })
    end
  [answer ? 200 : 404, { 'content-type' => 'application/json' }, [JSON.dump(answer || {})]]
}
