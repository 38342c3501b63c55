# Sinatra. Run by puma.
require 'json'
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
    JSON.dump(handler: 'search', session: session && session.to_s.scrub, api_key: key && key.to_s.scrub)
  end
end

run App
