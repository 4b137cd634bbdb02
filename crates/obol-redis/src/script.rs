use redis::Cmd;

/// A Lua script of some crate: a file of its own with a version in its name (DESIGN §5).
#[derive(Debug)]
pub struct Script {
    name: &'static str,
    source: &'static str,
    sha: String,
}

impl Script {
    /// A script; `name` is that of its file and says which one failed.
    pub fn new(name: &'static str, source: &'static str) -> Self {
        let sha = redis::Script::new(source).get_hash().to_owned();
        Self { name, source, sha }
    }

    /// The name, for logs.
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn call(&self, keys: &[&str], args: &[&[u8]]) -> Cmd {
        with_arguments("EVALSHA", &self.sha, keys, args)
    }

    /// With its text, for a server that does not know it.
    pub(crate) fn call_in_full(&self, keys: &[&str], args: &[&[u8]]) -> Cmd {
        with_arguments("EVAL", self.source, keys, args)
    }
}

fn with_arguments(name: &str, script: &str, keys: &[&str], args: &[&[u8]]) -> Cmd {
    let mut cmd = redis::cmd(name);
    cmd.arg(script).arg(keys.len());
    for key in keys {
        cmd.arg(*key);
    }
    for arg in args {
        cmd.arg(*arg);
    }
    cmd
}
