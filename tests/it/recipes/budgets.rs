//! Budgets for language models, in front of an app with the responses of each API. The field `plan`
//! of a request has the tokens that the response reports: input, output, cached.

use super::RecipeRun;
use crate::support::prelude::*;

/// A recipe, and what the user "ann" has spent.
struct BudgetRun {
    run: RecipeRun,
    policy: &'static str,
    used: u64,
}

impl BudgetRun {
    async fn start(heading: &str, policy: &'static str) -> Self {
        let upstream = Upstream::with_handler(answer_call).await;
        let run = RecipeRun::start_with(heading, |setup| setup.owned_upstream(upstream));
        Self {
            run: run.await,
            policy,
            used: 0,
        }
    }

    async fn post(&self, target: &str, call: &Value) -> RawResponse {
        let request = self
            .run
            .proxy
            .request("POST", target)
            .header("X-User", "ann");
        let request = request.header("Content-Type", "application/json");
        request.body(call.to_string()).send().await
    }

    /// Sends a call, and waits until its cost is settled: these units.
    async fn spend(&mut self, target: &str, call: &Value, units: u64) -> RawResponse {
        let response = self.post(target, call).await;
        assert_eq!(response.status, 200, "{target} {call} {}", response.text());
        self.used += units;
        let is_settled = async || self.read_used().await == self.used;
        wait_until(format!("{units} units of {target} {call}"), is_settled).await;
        response
    }

    async fn read_used(&self) -> u64 {
        let target = format!("/keys?policy={}&key=ann", self.policy);
        let key = self.run.proxy.admin_request("GET", &target).send().await;
        key.json()["limits"][0]["used"].as_u64().unwrap()
    }
}

async fn answer_call(request: Request<Incoming>) -> UpstreamResponse {
    let target = request.uri().to_string();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let call: Value = serde_json::from_slice(&body).unwrap_or_default();
    let plan = [0, 1, 2].map(|at| call["plan"][at].as_u64().unwrap_or_default());
    let is_stream = call["stream"] == true || target.contains("alt=sse");
    let documents = match target.split('?').next().unwrap() {
        "/v1/chat/completions" => chat(&call, plan, is_stream),
        "/v1/responses" => responses(plan, is_stream),
        "/v1/messages" => messages(plan, is_stream),
        "/v1/embeddings" => vec![json!({ "object": "list", "usage": { "total_tokens": plan[0] } })],
        "/v1/images/generations" => vec![image(plan)],
        "/mcp" => tool_result(plan, is_stream),
        _ => gemini(plan),
    };
    if is_stream {
        return stream_events(documents);
    }
    let text = match &*documents {
        [document] => document.to_string(),
        list => json!(list).to_string(),
    };
    let response = Response::builder().header("content-type", "application/json");
    response.body(full_body(text)).unwrap()
}

/// An event for each document. Each event has 250 bytes at least.
fn stream_events(documents: Vec<Value>) -> UpstreamResponse {
    let (sender, body) = channel_body();
    tokio::spawn(async move {
        for document in documents {
            let name = document["type"].as_str().unwrap_or("message");
            let event = format!("event: {name}\ndata: {document}");
            if !sender.send(format!("{event:<248}\n\n")).await {
                return;
            }
        }
    });
    let response = Response::builder().header("content-type", "text/event-stream");
    response.body(body).unwrap()
}

/// A stream has an event for each output token, and the usage if the client asks for it.
fn chat(call: &Value, [input, output, cached]: [u64; 3], is_stream: bool) -> Vec<Value> {
    let details = json!({ "cached_tokens": cached });
    let usage = json!({ "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output, "prompt_tokens_details": details });
    if !is_stream {
        let message = json!({ "role": "assistant", "content": "word" });
        let choices = json!([{ "index": 0, "message": message, "finish_reason": "stop" }]);
        return vec![json!({ "object": "chat.completion", "choices": choices, "usage": usage })];
    }
    let choices = json!([{ "index": 0, "delta": { "content": "word" } }]);
    let chunk = json!({ "object": "chat.completion.chunk", "choices": choices, "usage": null });
    let mut chunks = vec![chunk; usize::try_from(output).unwrap()];
    if call["stream_options"]["include_usage"] == true {
        chunks.push(json!({ "object": "chat.completion.chunk", "choices": [], "usage": usage }));
    }
    chunks
}

fn responses([input, output, _]: [u64; 3], is_stream: bool) -> Vec<Value> {
    let usage =
        json!({ "input_tokens": input, "output_tokens": output, "total_tokens": input + output });
    let response = |usage: &Value| json!({ "object": "response", "output": [], "usage": usage });
    match is_stream {
        false => vec![response(&usage)],
        true => vec![
            json!({ "type": "response.created", "response": response(&Value::Null) }),
            json!({ "type": "response.output_text.delta", "delta": "word" }),
            json!({ "type": "response.completed", "response": response(&usage) }),
        ],
    }
}

fn messages([input, output, cached]: [u64; 3], is_stream: bool) -> Vec<Value> {
    let message = |output: u64| {
        let usage = json!({ "input_tokens": input, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 8, "output_tokens": output });
        json!({ "type": "message", "content": [], "usage": usage })
    };
    match is_stream {
        false => vec![message(output)],
        true => vec![
            json!({ "type": "message_start", "message": message(1) }),
            json!({ "type": "content_block_delta", "delta": { "type": "text_delta", "text": "word" } }),
            json!({ "type": "message_delta", "usage": { "output_tokens": output } }),
            json!({ "type": "message_stop" }),
        ],
    }
}

/// Each document has the usage so far.
fn gemini([input, output, _]: [u64; 3]) -> Vec<Value> {
    let usage = |output: u64| json!({ "promptTokenCount": input, "candidatesTokenCount": output, "totalTokenCount": input + output });
    let document = |output| json!({ "candidates": [], "usageMetadata": usage(output) });
    vec![document(output / 2), document(output)]
}

fn image([input, output, _]: [u64; 3]) -> Value {
    match output {
        0 => json!({ "data": [] }),
        output => {
            json!({ "data": [], "usage": { "input_tokens": input, "output_tokens": output } })
        }
    }
}

fn tool_result([input, output, _]: [u64; 3], is_stream: bool) -> Vec<Value> {
    let usage = json!({ "usage": { "total_tokens": input + output } });
    let result = json!({ "jsonrpc": "2.0", "id": 1, "result": { "content": [], "structuredContent": usage } });
    let notification = json!({ "jsonrpc": "2.0", "method": "notifications/message" });
    match is_stream {
        false => vec![result],
        true => vec![notification, result],
    }
}

#[tokio::test]
async fn openai() {
    let mut budget = BudgetRun::start("OpenAI", "tokens").await;
    let (chat, responses) = ("/v1/chat/completions", "/v1/responses");
    let stream = json!({ "plan": [120, 80], "stream": true });
    for target in [chat, responses] {
        let call = json!({ "plan": [120, 80], "max_completion_tokens": 4000 });
        budget.spend(target, &call, 200).await;
    }
    budget.spend(responses, &stream, 200).await;
    let mut with_usage = stream.clone();
    with_usage["stream_options"] = json!({ "include_usage": true });
    budget.spend(chat, &with_usage, 200).await;
    // Without the usage: the estimate, or a unit for each 250 bytes.
    let size = stream.to_string().len();
    budget
        .spend(chat, &stream, 500 + size.div_ceil(4) as u64)
        .await;
    let long = json!({ "plan": [0, 700], "stream": true });
    budget.spend(chat, &long, 700).await;

    // 1,000 tokens are left, and the response would have 5,000.
    let units = 99_000 - budget.used;
    budget
        .spend(chat, &json!({ "plan": [0, units] }), units)
        .await;
    let response = budget
        .post(chat, &json!({ "plan": [0, 5000], "stream": true }))
        .await;
    response.expect_status(200);
    let text = response.text();
    let (events, last) = text.split_once("event: error\ndata: ").expect(&text);
    assert!(events.ends_with("\n\n"), "{events}");
    assert!(
        (1000..=1001).contains(&(events.len() / 250)),
        "{}",
        events.len()
    );
    let error: Value = serde_json::from_str(last).unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded");
    assert_eq!(budget.post(chat, &stream).await.status, 429);
}

#[tokio::test]
async fn anthropic() {
    let mut budget = BudgetRun::start("Anthropic", "tokens").await;
    // 60 + 5 · 80 + 40 / 10 + 1.25 · 8
    for stream in [false, true] {
        let call = json!({ "plan": [60, 80, 40], "max_tokens": 32_000, "stream": stream });
        budget.spend("/v1/messages", &call, 474).await;
    }
    // Rounded up.
    let call = json!({ "plan": [60, 80, 41], "max_tokens": 100 });
    budget.spend("/v1/messages", &call, 475).await;
}

#[tokio::test]
async fn gemini_documents_and_streams() {
    let mut budget = BudgetRun::start("Gemini", "tokens").await;
    let config = json!({ "maxOutputTokens": 1000 });
    let call = json!({ "plan": [50, 80], "generationConfig": config });
    for target in [
        "/v1/models/gemini-2.5-pro:generateContent",
        "/v1beta/models/gemini-2.5-pro:streamGenerateContent",
        "/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse",
    ] {
        budget.spend(target, &call, 130).await;
    }
}

#[tokio::test]
async fn mcp() {
    let mut budget = BudgetRun::start("MCP", "tools").await;
    let call = |tool: &str, output: u64, stream: bool| {
        let params = json!({ "name": tool, "arguments": {} });
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params, "plan": [20, output], "stream": stream })
    };
    budget.spend("/mcp", &call("search", 80, false), 100).await;
    budget.spend("/mcp", &call("report", 80, true), 100).await;
    budget.spend("/mcp", &call("other", 80, false), 0).await;
    budget
        .spend("/mcp", &call("search", 9_480, false), 9_500)
        .await;
    let rejected = budget.post("/mcp", &call("search", 0, false)).await;
    rejected
        .expect_status(429)
        .expect_header("content-type", "application/json");
    assert_eq!(rejected.json()["error"]["code"], -32029);
    let list = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    budget.spend("/mcp", &list, 0).await;
    let batch = json!([call("search", 0, false)]);
    assert_eq!(budget.post("/mcp", &batch).await.status, 400);
}

#[tokio::test]
async fn money() {
    let mut budget = BudgetRun::start("Money", "chat").await;
    let chat = "/v1/chat/completions";
    // 1.25 · 1000 + 10 · 200 − 1.125 · 400
    for (model, units) in [
        ("gpt-5", 2800),
        ("gpt-5-mini-2025-08-07", 560),
        ("gpt-5-nano", 112),
        ("new", 2800),
    ] {
        for stream in [false, true] {
            let options = json!({ "include_usage": true });
            let call = json!({ "model": model, "plan": [1000, 200, 400], "stream": stream, "stream_options": options });
            budget.spend(chat, &call, units).await;
        }
    }
    let call = json!({ "model": "text-embedding-3-small", "plan": [5000] });
    budget.spend("/v1/embeddings", &call, 100).await;
    let (image, old) = (json!({ "plan": [50, 1056] }), json!({ "n": 2 }));
    budget.spend("/v1/images/generations", &image, 42_490).await;
    // A response without usage costs the estimate.
    budget.spend("/v1/images/generations", &old, 84_000).await;
    // The policies have one budget.
    let images = json!({ "plan": [0, 121_500] });
    budget
        .spend("/v1/images/generations", &images, 4_860_000)
        .await;
    assert_eq!(
        budget.post("/v1/images/generations", &image).await.status,
        429
    );
    let long = json!({ "max_completion_tokens": 8000, "plan": [0, 1] });
    assert_eq!(budget.post(chat, &long).await.status, 429);
}
