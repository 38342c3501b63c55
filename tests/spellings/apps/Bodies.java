import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.MapperFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.json.JsonMapper;
import com.google.gson.Gson;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.sun.net.httpserver.HttpServer;
import java.io.ByteArrayInputStream;
import java.io.InputStreamReader;
import java.math.BigDecimal;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.Executors;
import org.json.JSONArray;
import org.json.JSONObject;

/** How Java's parsers read a body. Arguments: NAME=PORT for each. A rejected body is answered with 400. */
public class Bodies {
    static final String[] NAMES = {"model", "method", "max_tokens"};
    static final ObjectMapper ANSWERS = new ObjectMapper();

    /** Fields as most applications declare them. */
    public static class Call {
        public String model;
        public String method;
        public Long max_tokens;
        public Params params;
    }

    public static class Params {
        public String name;
    }

    interface Reader {
        Map<String, Object> read(byte[] body) throws Exception;
    }

    static Object number(BigDecimal value) {
        if (value.precision() > 600 || Math.abs((long) value.scale()) > 600) return Map.of("n", "very long");
        BigDecimal plain = value.signum() == 0 ? BigDecimal.ZERO : value.stripTrailingZeros();
        return Map.of("n", plain.scale() <= 0 ? plain.toBigInteger().toString() : plain.toString());
    }

    static Object number(String text) {
        try {
            return number(new BigDecimal(text));
        } catch (NumberFormatException error) {
            return Map.of("n", text);
        }
    }

    static Object shown(JsonNode value) {
        if (value.isTextual()) return value.textValue();
        if (value.isBoolean()) return value.booleanValue();
        if (value.isNumber()) return number(value.asText());
        if (value.isNull()) return null;
        return Map.of("t", value.isArray() ? "list" : "object");
    }

    static Map<String, Object> jackson(ObjectMapper mapper, byte[] body) throws Exception {
        JsonNode root = mapper.readTree(body);
        Map<String, Object> found = new LinkedHashMap<>();
        for (String name : NAMES) if (root.has(name)) found.put(name, shown(root.get(name)));
        JsonNode name = root.path("params").path("name");
        if (!name.isMissingNode()) found.put("name", shown(name));
        return found;
    }

    static Map<String, Object> typed(Call call) {
        if (call == null) throw new IllegalArgumentException("no object");
        Map<String, Object> found = new LinkedHashMap<>();
        if (call.model != null) found.put("model", call.model);
        if (call.method != null) found.put("method", call.method);
        if (call.max_tokens != null) found.put("max_tokens", Map.of("n", call.max_tokens.toString()));
        if (call.params != null && call.params.name != null) found.put("name", call.params.name);
        return found;
    }

    static Object shown(JsonElement value) {
        if (value.isJsonNull()) return null;
        if (value.isJsonArray()) return Map.of("t", "list");
        if (value.isJsonObject()) return Map.of("t", "object");
        if (value.getAsJsonPrimitive().isString()) return value.getAsString();
        if (value.getAsJsonPrimitive().isBoolean()) return value.getAsBoolean();
        return number(value.getAsString());
    }

    static Map<String, Object> gson(byte[] body) {
        JsonObject root = JsonParser.parseReader(new InputStreamReader(new ByteArrayInputStream(body), StandardCharsets.UTF_8)).getAsJsonObject();
        Map<String, Object> found = new LinkedHashMap<>();
        for (String name : NAMES) if (root.has(name)) found.put(name, shown(root.get(name)));
        JsonElement params = root.get("params");
        if (params != null && params.isJsonObject() && params.getAsJsonObject().has("name"))
            found.put("name", shown(params.getAsJsonObject().get("name")));
        return found;
    }

    static Object shownOrgJson(Object value) {
        if (value instanceof String || value instanceof Boolean) return value;
        if (value instanceof Number) return number(value.toString());
        if (value == JSONObject.NULL) return null;
        return Map.of("t", value instanceof JSONArray ? "list" : "object");
    }

    static Map<String, Object> orgJson(byte[] body) throws Exception {
        JSONObject root = new JSONObject(new String(body, StandardCharsets.UTF_8));
        Map<String, Object> found = new LinkedHashMap<>();
        for (String name : NAMES) if (root.has(name)) found.put(name, shownOrgJson(root.get(name)));
        JSONObject params = root.optJSONObject("params");
        if (params != null && params.has("name")) found.put("name", shownOrgJson(params.get("name")));
        return found;
    }

    public static void main(String[] arguments) throws Exception {
        ObjectMapper tree = JsonMapper.builder().enable(DeserializationFeature.USE_BIG_DECIMAL_FOR_FLOATS).build();
        // As Spring Boot configures it.
        ObjectMapper spring = JsonMapper.builder().disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES)
            .disable(MapperFeature.DEFAULT_VIEW_INCLUSION).build();
        ObjectMapper ignoringCase = JsonMapper.builder().disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES)
            .enable(MapperFeature.ACCEPT_CASE_INSENSITIVE_PROPERTIES).build();
        Gson gson = new Gson();
        Map<String, Reader> readers = Map.of(
            "jackson", body -> jackson(tree, body),
            "jackson-spring", body -> typed(spring.readValue(body, Call.class)),
            "jackson-no-case", body -> typed(ignoringCase.readValue(body, Call.class)),
            "gson", Bodies::gson,
            "gson-typed", body -> typed(gson.fromJson(new String(body, StandardCharsets.UTF_8), Call.class)),
            "org-json", Bodies::orgJson);
        for (String argument : arguments) {
            String[] parts = argument.split("=");
            Reader reader = readers.get(parts[0]);
            HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(parts[1])), 0);
            server.createContext("/", exchange -> {
                int status = 200;
                byte[] answer;
                try {
                    answer = ANSWERS.writeValueAsBytes(reader.read(exchange.getRequestBody().readAllBytes()));
                } catch (Exception | StackOverflowError error) {
                    status = 400;
                    answer = new byte[] {'-'};
                }
                exchange.sendResponseHeaders(status, answer.length);
                exchange.getResponseBody().write(answer);
                exchange.close();
            });
            server.setExecutor(Executors.newFixedThreadPool(4));
            server.start();
        }
    }
}
