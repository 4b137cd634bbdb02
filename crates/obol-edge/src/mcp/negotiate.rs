//! `Accept` and `Content-Type` (RFC 9110, "Content Negotiation"; transports, "Sending Messages to the Server").

use http::{HeaderMap, HeaderName, header};

/// Which of the two kinds of answer a client takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Accept {
    pub(super) json: bool,
    pub(super) sse: bool,
}

impl Accept {
    /// No `Accept` header accepts everything; `q=0` accepts nothing; the most specific range decides.
    pub(super) fn parse(headers: &HeaderMap) -> Self {
        // What the SDKs send, in one header or with its halves the other way round.
        const USUAL: [&str; 2] =
            ["application/json, text/event-stream", "text/event-stream, application/json"];
        let mut values = headers.get_all(header::ACCEPT).iter();
        if let (Some(only), None) = (values.next(), values.next())
            && USUAL.iter().any(|usual| only == usual)
        {
            return Self { json: true, sse: true };
        }
        let mut json = Quality::default();
        let mut sse = Quality::default();
        let mut any = false;
        for value in headers.get_all(header::ACCEPT) {
            any = true;
            for range in value.to_str().unwrap_or_default().split(',') {
                json.consider(range, "application", "json");
                sse.consider(range, "text", "event-stream");
            }
        }
        if any { Self { json: json.accepted(), sse: sse.accepted() } } else { Self { json: true, sse: true } }
    }
}

/// The quality that the most specific matching range gives.
#[derive(Default)]
struct Quality {
    specificity: u8,
    zero: bool,
}

impl Quality {
    fn consider(&mut self, range: &str, kind: &str, subtype: &str) {
        let mut parts = range.split(';').map(str::trim);
        let Some((k, s)) = parts.next().and_then(|m| m.split_once('/')) else { return };
        let specificity = match (k, s) {
            ("*", "*") => 1,
            (k, "*") if k.eq_ignore_ascii_case(kind) => 2,
            (k, s) if k.eq_ignore_ascii_case(kind) && s.eq_ignore_ascii_case(subtype) => 3,
            _ => return,
        };
        if specificity >= self.specificity {
            self.specificity = specificity;
            self.zero = parts.any(|p| {
                p.strip_prefix("q=")
                    .or_else(|| p.strip_prefix("Q="))
                    .is_some_and(|q| q.parse() == Ok(0.0_f32))
            });
        }
    }

    fn accepted(&self) -> bool {
        self.specificity > 0 && !self.zero
    }
}

/// Whether the body is declared as JSON, with any parameters.
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let declared = text(headers, &header::CONTENT_TYPE).unwrap_or_default();
    declared.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// The value of a header that stands there at most once.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|v| v.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_is_read_as_rfc_9110_says() {
        let cases: &[(&[&str], bool, bool)] = &[
            (&[], true, true),
            (&["application/json, text/event-stream"], true, true),
            (&["application/json", "text/event-stream"], true, true),
            (&["*/*"], true, true),
            (&["application/*"], true, false),
            (&["TEXT/EVENT-STREAM;q=0.5"], false, true),
            (&["application/json;q=0, */*"], false, true),
            (&["text/html"], false, false),
            (&[""], false, false),
        ];
        for (values, json, sse) in cases {
            let mut headers = HeaderMap::new();
            for value in *values {
                headers.append(header::ACCEPT, value.parse().unwrap());
            }
            assert_eq!(Accept::parse(&headers), Accept { json: *json, sse: *sse }, "{values:?}");
        }
    }

    #[test]
    fn only_json_is_json() {
        for (value, expected) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("text/plain", false),
            ("application/json-patch+json", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            assert_eq!(is_json(&headers), expected, "{value}");
        }
        assert!(!is_json(&HeaderMap::new()));
    }
}
