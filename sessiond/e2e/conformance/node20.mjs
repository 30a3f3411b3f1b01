// Lets the conformance suite start on Node 20, by `node --import ./node20.mjs`. It imports fs.globSync, which came with
// Node 22, for commands that are not used here; as an import that does not exist keeps a module from loading at all,
// the suite gets a module fs with a globSync that throws. On Node 22 this does nothing.

import fs from 'node:fs';
import { register } from 'node:module';

if (!('globSync' in fs)) {
  const source = (code) => `data:text/javascript,${encodeURIComponent(code)}`;
  const patched = source(`
    export * from 'node:fs';
    export { default } from 'node:fs';
    export const globSync = () => { throw new Error('fs.globSync needs Node 22'); };
  `);
  register(
    source(`
      export const resolve = (specifier, context, next) =>
        specifier === 'fs' && context.parentURL?.includes('/@modelcontextprotocol/conformance/')
          ? { url: ${JSON.stringify(patched)}, shortCircuit: true }
          : next(specifier, context);
    `),
  );
}
