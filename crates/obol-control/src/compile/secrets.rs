use std::collections::BTreeMap;
use std::path::Path;

use obol_model::snapshot::{Auth, Sealed};
use obol_model::{KeyRing, Secret};

use super::reader::{Reader, short};
use super::yaml::{Node, Place, Value, place};
use crate::sources::reason;

const LITERAL: &str = "put it into an environment variable or a file and name that: `{ secret: \"env:NAME\" }` or \
                       `{ secret: \"file:/run/secrets/NAME\" }`";

/// Headers that the gateway writes itself.
const OURS: [&str; 10] = [
    "host",
    "connection",
    "content-length",
    "content-type",
    "transfer-encoding",
    "upgrade",
    "te",
    "accept",
    "mcp-session-id",
    "mcp-protocol-version",
];

impl<'r> Reader<'r> {
    /// `{ bearer: { secret: … } }` or `{ header: { name: …, value: { secret: … } } }`.
    pub(super) fn auth(&mut self, node: &Node) -> Option<Auth> {
        let fields = self.fields(node, "`auth`", &["bearer", "header"]);
        match (fields.get("bearer"), fields.get("header")) {
            (Some(bearer), None) => self.secret(bearer, "`bearer`", true).map(Auth::Bearer),
            (None, Some(header)) => {
                let fields = self.fields(header, "`header`", &["name", "value"]);
                let (Some(name_node), Some(value)) = (fields.get("name"), fields.get("value")) else {
                    let help = "write `header: { name: x-api-key, value: { secret: \"env:NAME\" } }`";
                    self.fault(fields.place, "`header` needs a `name` and a `value`", help);
                    return None;
                };
                let value = self.secret(value, "`value`", true);
                let name = self.string(name_node, "`name`")?.to_ascii_lowercase();
                let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
                if name.is_empty() || name.len() > 128 || !name.bytes().all(token) {
                    self.fault(place(name_node), format!("`{}` is no name of a header", short(&name)), "");
                    return None;
                }
                if OURS.contains(&name.as_str()) {
                    self.fault(place(name_node), format!("the gateway sets the header `{name}` itself"), "");
                    return None;
                }
                Some(Auth::Header { name, value: value? })
            }
            _ => {
                let help = "write `auth: { bearer: { secret: \"env:NAME\" } }`";
                self.fault(fields.place, "`auth` needs either `bearer` or `header`", help);
                None
            }
        }
    }

    /// `{ NAME: text or { secret: … } }`; everything is sealed, since people put credentials into plain values too.
    pub(super) fn environment(&mut self, node: &Node) -> BTreeMap<String, Sealed> {
        let mut variables = BTreeMap::new();
        for (name, at, value) in self.entries(node, "`env`") {
            if name.is_empty() || name.len() > 256 || name.contains(['=', '\0']) {
                self.fault(at, format!("`{}` is no name of a variable", short(name)), "");
                continue;
            }
            let sealed = if matches!(value.value, Value::Map(_)) {
                self.secret(value, &format!("`{name}`"), false)
            } else if self.credential_in_variable(name, value) {
                None
            } else {
                let text = self.scalar(value, &format!("`{name}`"));
                text.and_then(|text| self.seal(&Secret::new(text), place(value), false))
            };
            variables.extend(sealed.map(|sealed| (name.to_owned(), sealed)));
        }
        variables
    }

    /// `{ secret: "env:…" | "file:…" | "sealed:…" }`. Never quotes what it finds: a literal may be a credential.
    fn secret(&mut self, node: &Node, what: &str, header: bool) -> Option<Sealed> {
        if !matches!(node.value, Value::Map(_)) {
            self.fault(place(node), format!("{what} must not be a literal credential"), LITERAL);
            return None;
        }
        let fields = self.fields(node, what, &["secret"]);
        let Some(source) = fields.get("secret") else {
            self.fault(fields.place, format!("{what} needs a `secret`"), LITERAL);
            return None;
        };
        let at = place(source);
        let text = self.string(source, "`secret`")?;
        let value = match text.split_once(':') {
            Some(("env" | "file" | "sealed", _)) if self.secrets.is_none() => {
                return Some(Sealed(String::new()));
            }
            Some(("env", name)) if name.starts_with("OBOL_") => {
                // Whoever writes a workspace file must not be able to send our own credentials somewhere.
                let help = "use a variable of another name; those of the gateway itself are out of reach";
                self.fault(at, format!("a workspace file may not name `{}`", short(name)), help);
                Err(())
            }
            Some(("env", name)) => self.secrets.and_then(|options| (options.env)(name)).ok_or_else(|| {
                let help = "set it where control runs, or correct the name";
                self.fault(at, format!("the environment variable `{}` is not set", short(name)), help);
            }),
            Some(("file", path)) => self.secret_file(path, at),
            Some(("sealed", sealed)) => return self.sealed(Sealed(sealed.to_owned()), at),
            _ => {
                self.fault(at, "a secret must not stand in the file", LITERAL);
                Err(())
            }
        };
        self.seal(&Secret::new(value.ok()?), at, header)
    }

    fn secret_file(&mut self, path: &str, at: Place) -> Result<String, ()> {
        let shown = short(path);
        let read = self.sources.read(&self.folder.join(Path::new(path)));
        let fault = match read.map(String::from_utf8) {
            // Editors and `echo` end files with a line feed that is no part of the secret.
            Ok(Ok(text)) => return Ok(text.trim_end_matches(['\r', '\n']).to_owned()),
            Ok(Err(_)) => format!("the secret file `{shown}` is not text"),
            Err(e) => format!("the secret file `{shown}` cannot be read: {}", reason(&e)),
        };
        self.fault(at, fault, "create it where control runs, or correct the path");
        Err(())
    }

    fn sealed(&mut self, sealed: Sealed, at: Place) -> Option<Sealed> {
        let form = sealed.0.split('.').collect::<Vec<_>>();
        let well_formed = matches!(form.as_slice(), ["v1", id, data] if !id.is_empty() && !data.is_empty());
        let opened = match (self.key_ring(), &self.workspace) {
            (Some(ring), Some(workspace)) => ring.open(workspace, &sealed).map(Some),
            _ if well_formed => Ok(None),
            _ => Err(obol_model::SealError::Damaged),
        };
        match opened {
            // Sealed again with the first key, as everything else: only then can an old key go.
            Ok(Some(value)) => self.seal(&value, at, false),
            Ok(None) => Some(sealed),
            Err(e) => {
                let help = "seal it again for this workspace with a key of `OBOL_CREDENTIAL_KEY`";
                self.fault(at, format!("the sealed secret cannot be used: {e}"), help);
                None
            }
        }
    }

    fn key_ring(&self) -> Option<&'r KeyRing> {
        self.secrets.and_then(|options| options.key_ring)
    }

    /// Without a key ring or a workspace there is nothing to seal with, and the result is not for publication.
    fn seal(&mut self, value: &Secret<String>, at: Place, header: bool) -> Option<Sealed> {
        let text = value.expose();
        let unfit = if header && text.is_empty() {
            Some("the secret is empty")
        } else if header && !text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
            Some("the secret has characters that no HTTP header can carry")
        } else if text.contains('\0') {
            Some("the value has a character that no environment can carry")
        } else {
            None
        };
        if let Some(message) = unfit {
            self.fault(at, message, "correct the value where it is kept");
            return None;
        }
        let (Some(ring), Some(workspace)) = (self.key_ring(), &self.workspace) else {
            return Some(Sealed(String::new()));
        };
        match ring.seal(workspace, value) {
            Ok(sealed) => Some(sealed),
            Err(e) => {
                self.fault(at, format!("the secret cannot be sealed: {e}"), "");
                None
            }
        }
    }
}
