# How Ruby reads a body: /json as JSON, /form as Rack does. A rejected body is answered with 400.
require 'json'
require 'rack'

module Bodies
  def self.shown(value)
    case value
    when String then value.dup.force_encoding('UTF-8').valid_encoding? ? value : { b: value.unpack1('H*') }
    when Integer then { n: value.bit_length > 2000 ? 'very long' : value.to_s }
    when Float then { n: value.finite? && value == value.floor ? value.to_i.to_s : value.to_s }
    when Array then { t: 'list' }
    when Hash then { t: 'object' }
    else value
    end
  end

  def self.fields(root)
    return {} unless root.is_a?(Hash)

    found = %w[model method max_tokens].select { |name| root.key?(name) }.to_h { |name| [name, shown(root[name])] }
    found['name'] = shown(root['params']['name']) if root['params'].is_a?(Hash) && root['params'].key?('name')
    found
  end
end

run(lambda do |env|
  request = Rack::Request.new(env)
  root = if env['PATH_INFO'] == '/json'
           JSON.parse(env['rack.input'].read)
         else
           raise 'no form' unless env['CONTENT_TYPE'].to_s.downcase.include?('form')

           request.POST
         end
  [200, {}, [JSON.generate(Bodies.fields(root))]]
rescue StandardError, SystemStackError => e
  [400, {}, [e.message[0, 200].b]]
end)
