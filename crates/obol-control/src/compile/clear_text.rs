//! Credentials that stand in a file in clear text. Only `{ secret: … }` is encrypted and kept out of logs; everything
//! else is published as it is, and shown.
//!
//! Two signs: the form of a value (well-known tokens have prefixes that nothing else has), wherever it stands; and the
//! name that is given to a value, in the places that people use for credentials.

use url::Url;

use super::reader::Reader;
use super::yaml::{Node, Value, place};

/// The way out for what is sent to an upstream.
const AS_HEADER: &str = "send it as a header instead: `auth: { header: { name: x-api-key, value: { secret: \"env:NAME\" } } }` or \
                         `auth: { bearer: { secret: \"env:NAME\" } }`";
/// The way out for what a child process is to know.
const AS_VARIABLE: &str = "give it to the program as a variable: `env: { NAME: { secret: \"env:NAME\" } }`; command lines are visible to \
                           every user of the machine";
/// The way out for everything else.
const AS_SECRET: &str = "put it into an environment variable or a file and name that: `{ secret: \"env:NAME\" }`; and replace the \
                         credential, which stood in clear text";

/// What tokens begin with, and how many characters follow at least.
const PREFIXES: [(&str, usize); 31] = [
    ("sk-", 16),
    ("sk_live_", 16),
    ("sk_test_", 16),
    ("rk_live_", 16),
    ("whsec_", 16),
    ("gsk_", 20),
    ("ghp_", 20),
    ("gho_", 20),
    ("ghu_", 20),
    ("ghs_", 20),
    ("ghr_", 20),
    ("github_pat_", 20),
    ("glpat-", 16),
    ("xoxa-", 10),
    ("xoxb-", 10),
    ("xoxp-", 10),
    ("xoxs-", 10),
    ("xapp-", 10),
    ("AKIA", 16),
    ("ASIA", 16),
    ("AIza", 30),
    ("ya29.", 20),
    ("hf_", 24),
    ("npm_", 24),
    ("pypi-", 24),
    ("dop_v1_", 24),
    ("SG.", 32),
    ("shpat_", 20),
    ("lin_api_", 20),
    ("figd_", 20),
    ("obol_", 40),
];

/// Whether a word has the form of a token. What is a token has a digit, and no spaces, dots aside.
fn is_token(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let known = PREFIXES.iter().any(|(prefix, length)| {
        word.strip_prefix(prefix).is_some_and(|rest| {
            rest.len() >= *length && rest.chars().all(plain) && rest.contains(|c: char| c.is_ascii_digit())
        })
    });
    // A JSON web token: the first two parts are JSON, so they begin alike.
    known || word.len() > 40 && word.starts_with("eyJ") && word.matches(".eyJ").count() == 1
}

/// The words of a text, in which a token would be whole.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')))
}

/// Whether a text holds something that has the form of a credential.
pub(super) fn holds_credential(text: &str) -> bool {
    let private_key = text.contains("-----BEGIN") && text.contains("PRIVATE KEY-----");
    private_key || in_header(text) || words(text).any(is_token)
}

/// `Bearer TOKEN`, or a header that carries credentials with its value.
fn in_header(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    ["bearer ", "basic ", "authorization:", "x-api-key:", "api-key:"].iter().any(|sign| {
        lower.split_once(sign).is_some_and(|(_, value)| {
            let value = value.trim_start();
            let value = value.strip_prefix("bearer ").unwrap_or(value).trim();
            let long = value.chars().take_while(|c| !c.is_whitespace() && *c != '"').count() >= 8;
            let of_header = sign.ends_with(':');
            !is_reference(value)
                && !value.is_empty()
                && (of_header || long && value.contains(char::is_numeric))
        })
    })
}

/// Something that the program itself replaces: `${NAME}`, `$NAME`, `{{name}}`, `<name>`.
fn is_reference(value: &str) -> bool {
    value.is_empty() || value.starts_with(['$', '{', '<', '%'])
}

/// Whether what has this name is a credential. `--token-file` and `max_tokens` are none.
fn names_credential(name: &str) -> bool {
    let name: String =
        name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    let about = ["file", "path", "dir", "env", "name", "id", "url", "type", "tokens", "ttl", "limit", "size"];
    let parts = [
        "apikey",
        "accesskey",
        "secretkey",
        "privatekey",
        "token",
        "secret",
        "password",
        "passwd",
        "credential",
    ];
    let whole = ["key", "auth", "pwd", "pass", "sig", "signature", "authorization", "xapikey"];
    !about.iter().any(|end| name.ends_with(end))
        && (whole.contains(&name.as_str()) || parts.iter().any(|part| name.contains(part)))
}

/// Text without what has the form of a token: messages quote what they found.
pub(super) fn redacted(text: String) -> String {
    let tokens: Vec<String> = words(&text).filter(|word| is_token(word)).map(str::to_owned).collect();
    tokens.iter().fold(text, |text, token| text.replace(token, "[credential]"))
}

impl Reader<'_> {
    /// Looks for credentials by their form, everywhere in the file. What has a fault already is left alone: it is where
    /// a secret belongs and was said to be a literal one.
    pub(super) fn credentials_in(&mut self, node: &Node) {
        match &node.value {
            Value::Text(text) if holds_credential(text) => {
                let (line, column) = place(node);
                if !self.faults.iter().any(|f| (f.line, f.column) == (line, column)) {
                    self.fault((line, column), "this looks like a credential in clear text", AS_SECRET);
                }
            }
            Value::List(items) => items.iter().for_each(|item| self.credentials_in(item)),
            Value::Map(entries) => entries.iter().for_each(|(_, value)| self.credentials_in(value)),
            _ => {}
        }
    }

    /// A credential in the query or the path of a URL.
    pub(super) fn credential_in_url(&mut self, node: &Node, name: &str, url: &Url) {
        let by_name = url.query_pairs().find(|(name, value)| names_credential(name) && !is_reference(value));
        let message = match by_name {
            Some((parameter, _)) => {
                format!("`{name}` has a credential in clear text, the query parameter `{parameter}`")
            }
            None if url.path_segments().into_iter().flatten().any(is_token)
                || url.query_pairs().any(|(_, value)| is_token(&value)) =>
            {
                format!("`{name}` has a credential in clear text")
            }
            None => return,
        };
        self.fault(place(node), message, AS_HEADER);
    }

    /// Credentials among the arguments of a program: `--token VALUE`, `--token=VALUE`, `NAME=VALUE`, a header.
    pub(super) fn credential_in_command(&mut self, words: &[Node]) {
        let mut flag = None;
        for node in words {
            let Value::Text(text) = &node.value else {
                // A number is no credential.
                flag = None;
                continue;
            };
            let own = text.split_once('=').filter(|(name, value)| {
                names_credential(name) && !is_reference(value) && !value.bytes().all(|b| b.is_ascii_digit())
            });
            let of_flag = flag.take().filter(|_| !text.starts_with('-') && !is_reference(text));
            let message = match own.map(|(name, _)| name).or(of_flag) {
                Some(name) => format!("`command` has a credential in clear text, the value of `{name}`"),
                None if holds_credential(text) => "`command` has a credential in clear text".to_owned(),
                None => {
                    flag = Some(text.as_str()).filter(|text| text.starts_with('-') && names_credential(text));
                    continue;
                }
            };
            self.fault(place(node), message, AS_VARIABLE);
        }
    }

    /// Whether a variable of a child process holds a credential in clear text.
    pub(super) fn credential_in_variable(&mut self, name: &str, node: &Node) -> bool {
        let Value::Text(text) = &node.value else { return false };
        let found = names_credential(name) && !text.is_empty() || holds_credential(text);
        if found {
            self.fault(place(node), format!("`{name}` is a credential in clear text"), AS_SECRET);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_known_by_their_form() {
        for text in [
            "sk-proj-4f9a8b7c6d5e4f3a2b1c",
            "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
            "github_pat_11ABCDEFG0abcdefghijkl",
            "glpat-abcdefgh12345678",
            "xoxb-1234567890-abc",
            "AKIAIOSFODNN7EXAMPLE",
            "AIzaSyA1234567890abcdefghijklmnopqrstuvw",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dGVzdHNpZ25hdHVyZQ",
            "-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----",
            "obol_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA1",
            "Authorization: Bearer hunter2",
            "X-Api-Key:hunter2",
            "use Bearer abcdef123456 here",
            "https://x.example/?a=ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        ] {
            assert!(holds_credential(text), "{text}");
        }
        for text in [
            "sk-12345",
            "task-force-of-the-north-sea",
            "sk-learn-server-with-a-long-name",
            "AKIA",
            "npx",
            "@modelcontextprotocol/server-github",
            "Authorization:${AUTH_HEADER}",
            "the bearer of this letter",
            "basic authentication",
            "env:GITHUB_TOKEN",
            "/run/secrets/token",
            "eyJ",
        ] {
            assert!(!holds_credential(text), "{text}");
        }
    }

    #[test]
    fn credentials_are_known_by_their_name() {
        for name in [
            "--api-key",
            "API_KEY",
            "token",
            "GITHUB_TOKEN",
            "access_token",
            "key",
            "DB_PASSWORD",
            "x-api-key",
        ] {
            assert!(names_credential(name), "{name}");
        }
        for name in
            ["--token-file", "max_tokens", "SECRET_NAME", "KEY_ID", "PORT", "monkey", "--keyboard", "author"]
        {
            assert!(!names_credential(name), "{name}");
        }
    }

    #[test]
    fn messages_quote_no_token() {
        let text = "`ghp_16C7e42F292c6912E7710c838347Ae178B4a` is no connection name".to_owned();
        assert_eq!(redacted(text), "`[credential]` is no connection name");
    }
}
