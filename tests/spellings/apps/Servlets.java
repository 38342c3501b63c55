import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.nio.file.Files;
import java.util.function.Function;
import java.util.logging.LogManager;
import org.apache.catalina.Context;
import org.apache.catalina.startup.Tomcat;

/** Tomcat with one servlet per handler. Argument: the port. */
public class Servlets {
    public static void main(String[] arguments) throws Exception {
        LogManager.getLogManager().reset();
        var tomcat = new Tomcat();
        var folder = Files.createTempDirectory("spellings-tomcat").toString();
        tomcat.setBaseDir(folder);
        tomcat.setHostname("127.0.0.1");
        tomcat.setPort(Integer.parseInt(arguments[0]));
        tomcat.getConnector().setProperty("address", "127.0.0.1");
        var context = tomcat.addContext("", folder);
        add(context, "login", "/login", request -> "");
        add(context, "account", "/login/*", request -> value("user", user(request)));
        add(context, "admin", "/admin/*", request -> "");
        add(context, "public", "/public/*", request -> "");
        add(context, "healthz", "/healthz", request -> "");
        add(context, "search", "/search", request ->
            value("session", session(request)) + value("api_key", request.getParameter("api_key"))
                + value("x_user", request.getHeader("X-User")) + value("host", request.getServerName()));
        tomcat.start();
        tomcat.getServer().await();
    }

    static String user(HttpServletRequest request) {
        var path = request.getPathInfo();
        return path == null ? null : path.substring(1);
    }

    static String session(HttpServletRequest request) {
        if (request.getCookies() != null) {
            for (var cookie : request.getCookies()) {
                if (cookie.getName().equals("session")) return cookie.getValue();
            }
        }
        return null;
    }

    static String value(String name, String value) {
        var shown = value == null ? "null" : '"' + value.replaceAll("[^A-Za-z0-9.]", "?") + '"';
        return ", \"" + name + "\": " + shown;
    }

    static void add(Context context, String name, String pattern, Function<HttpServletRequest, String> read) {
        Tomcat.addServlet(context, name, new HttpServlet() {
            @Override
            protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
                response.getWriter().print("{\"handler\": \"" + name + '"' + read.apply(request) + '}');
            }
        });
        context.addServletMappingDecoded(pattern, name);
    }
}
