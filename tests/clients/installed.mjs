// Packages are installed outside the tree (scripts/setup.sh), where Node does not look for them by itself.

import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

function installed() {
  const dir = process.env.OBOL_TEST_NPM_DIR;
  if (!dir) throw new Error('OBOL_TEST_NPM_DIR is not set: eval "$(scripts/setup.sh env)"');
  return createRequire(`${dir}/`);
}

export const load = (specifier) => import(pathToFileURL(installed().resolve(specifier)).href);

/** By path, since a package seldom exports its `package.json`. */
export const versionOf = (name) => installed()(`./node_modules/${name}/package.json`).version;
