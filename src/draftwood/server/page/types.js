// @ts-check
/**
 * What comes over the wire and what is kept, for the type checker and for readers; nothing here runs.
 *
 * @typedef {"accepted" | "bonus" | "correction" | "plain"} Kind
 *
 * @typedef {object} Emitted  A token that an answer got.
 * @property {number} token
 * @property {string} text  Empty while its bytes are not a whole character yet.
 * @property {Kind} kind
 * @property {number} depth
 * @property {number | null} node  Its place in the tree, if it was guessed.
 * @property {number | null} p  The model's probability.
 * @property {number | null} q  The drafter's.
 *
 * @typedef {object} Tree  Node 0 is the last token that was certain before the step.
 * @property {number[]} tokens
 * @property {string[]} texts
 * @property {number[]} parents
 * @property {(number | null)[]} p
 * @property {(number | null)[]} q
 * @property {boolean[]} accepted
 *
 * @typedef {object} Step
 * @property {number} choice
 * @property {number} step
 * @property {number} seconds
 * @property {string} drafter
 * @property {string} law
 * @property {number} batch
 * @property {number} rows
 * @property {Tree | null} tree
 * @property {Emitted[]} emitted
 *
 * @typedef {object} Chunk
 * @property {{delta: {content?: string | null}, finish_reason: string | null}[]} choices
 * @property {Step[]} [trace]
 * @property {{message: string}} [error]
 *
 * @typedef {object} Law
 * @property {string} name
 * @property {boolean} lossless
 * @property {string} exact_for  The trees it takes.
 *
 * @typedef {object} ModelCard
 * @property {string} id
 * @property {string} drafter
 * @property {string[]} drafters
 * @property {string[]} [branching]  Those of them whose trees have branches.
 * @property {string} law
 * @property {Law[]} [laws]
 * @property {number} [max_nodes]
 * @property {number} [max_model_len]
 *
 * @typedef {object} Message
 * @property {"system" | "user" | "assistant"} role
 * @property {string} content
 *
 * @typedef {object} Wishes  `speculation` of a request.
 * @property {boolean} [enabled]
 * @property {string} [drafter]
 * @property {string} [law]
 * @property {number} [max_nodes]
 * @property {number} [depth]
 *
 * @typedef {object} Asking  What is the same for every request of the page.
 * @property {number} temperature
 * @property {number} seed
 * @property {number} max_tokens
 * @property {Wishes} speculation
 *
 * @typedef {object} Live
 * @property {number} running
 * @property {number} waiting
 * @property {number} max_running
 * @property {number} kv_use
 * @property {number | null} tokens_per_second
 * @property {number | null} tokens_per_step
 * @property {number[]} acceptance_by_depth
 * @property {{nodes: number | null, depth: number | null, name: string, why: string, expected_gain: number | null, measured_gain: number | null} | null} controller
 * @property {LastStep | null} last_step
 * @property {"ready" | "draining" | "dead"} status
 *
 * @typedef {object} LastStep  The last step that only decoded.
 * @property {number} sequences
 * @property {number} rows
 * @property {number} measured_seconds
 * @property {number | null} predicted_seconds  By the controller's cost table, for those rows.
 */
export {};
