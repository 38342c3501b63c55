import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.Executors;

/** The JDK's HttpServer. Argument: the port. It has no cookies and no query parameters. */
public class Jdk {
    public static void main(String[] arguments) throws IOException {
        var server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0])), 0);
        server.createContext("/", Jdk::handle);
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.start();
    }

    static void handle(HttpExchange exchange) throws IOException {
        var path = exchange.getRequestURI().getPath();
        String answer = null;
        if (path == null) {
            answer = null;
        } else if (path.equals("/login")) {
            answer = "{\"handler\": \"login\"}";
        } else if (path.startsWith("/login/")) {
            var user = path.substring("/login/".length()).replaceAll("[^A-Za-z0-9]", "?");
            answer = "{\"handler\": \"account\", \"user\": \"" + user + "\"}";
        } else if (path.startsWith("/admin/")) {
            answer = "{\"handler\": \"admin\"}";
        } else if (path.startsWith("/public/")) {
            answer = "{\"handler\": \"public\"}";
        } else if (path.equals("/healthz")) {
            answer = "{\"handler\": \"healthz\"}";
        } else if (path.equals("/search")) {
            var user = String.valueOf(exchange.getRequestHeaders().getFirst("X-User"));
            answer = "{\"handler\": \"search\", \"x_user\": \"" + user.replaceAll("[^A-Za-z0-9]", "?") + "\"}";
        }
        var body = (answer == null ? "{}" : answer).getBytes(StandardCharsets.UTF_8);
        exchange.sendResponseHeaders(answer == null ? 404 : 200, body.length);
        try (var out = exchange.getResponseBody()) {
            out.write(body);
        }
    }
}
