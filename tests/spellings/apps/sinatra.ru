# Sinatra. Run by puma.
require 'json'
require 'rack/auth/basic'
require 'sinatra/base'

class App < Sinatra::Base
  disable :protection, :logging, :show_exceptions, :raise_errors

  get('/login') { JSON.dump(handler: 'login') }
  get('/login/:user') { JSON.dump(handler: 'account', user: params['user'].to_s.scrub) }
  get('/admin/*') { JSON.dump(handler: 'admin') }
  get('/public/*') { JSON.dump(handler: 'public') }
  get('/healthz') { JSON.dump(handler: 'healthz') }
  get('/search') do
    session = request.cookies['session']
    key = params['api_key']
    key = key.first if key.is_a?(Array)
    credentials = Rack::Auth::Basic::Request.new(env)
    user = credentials.username if credentials.provided? && credentials.basic?
    values = { session: session, api_key: key, authorization: user }
    values.update(x_user: env['HTTP_X_USER'], host: request.host)
    JSON.dump(handler: 'search', **values.transform_values { |value| value && value.to_s.scrub })
  end
end

run App
