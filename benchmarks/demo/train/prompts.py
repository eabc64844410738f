"""Prompts of our own writing from which the target generates the training text of the demo draft.

``questions.txt`` holds some 16000 questions, each worded on its own, about ``TOPICS``, about others and about
nothing in particular. ``questions_validation.txt``, on twelve topics of its own, chooses the checkpoint; the topics of
the unseen half of ``../prompts_eval.json`` occur in neither. A test of disjointness is part of
``evaluate.py``.

Forms are what came first: mostly a question form filled with a topic; the rest (how-to questions, code,
sums, short scenes, rewriting, open questions) have no topic. A greedy target answers one prompt in one way
only, so variety must come from the prompts, and a draft learns the wording of a form with its answer: forms
alone do not carry over to questions that are worded otherwise.
"""

from __future__ import annotations

import pathlib
import random
from collections.abc import Sequence
from typing import Final, NamedTuple


class Conversation(NamedTuple):
    """Hold one chat to render: the system line (``None`` = the template's own) and the user's turn."""

    system: str | None
    user: str


TOPICS: Final[tuple[str, ...]] = tuple(
    """
the water cycle;photosynthesis;the French Revolution;black holes;machine learning;the Roman Empire;coffee;
bicycles;volcanoes;the human heart;electric cars;solar energy;the stock market;whales;the moon;dinosaurs;
chess;football;jazz music;impressionist painting;the internet;bread baking;gardening;vaccines;
the Great Wall of China;earthquakes;honey bees;inflation;democracy;Shakespeare;gravity;the Sahara desert;
penguins;public libraries;recycling;sleep;the Amazon rainforest;steam engines;computer programming;
healthy eating;climate change;the Olympic Games;space travel;ancient Egypt;DNA;antibiotics;
mountain climbing;personal budgeting;time management;public speaking;cats;dogs;rivers;chocolate;cheese;
railways;the printing press;trees;coral reefs;languages;mathematics;poetry;photography;swimming;robots;
nuclear power;wind turbines;the Renaissance;samurai;pirates;bridges;castles;the desert;clouds;rainbows;
thunderstorms;the brain;memory;emotions;music theory;the piano;guitars;ballet;theatre;movies;novels;
newspapers;radio;television;telephones;satellites;Mars;Jupiter;comets;the Sun;atoms;electricity;magnets;
light;sound;water;fire;soil;farming;rice;wheat;bananas;apples;honey;salt;sugar;vitamins;exercise;running;
basketball;tennis;skiing;hiking;camping;fishing;sharks;elephants;lions;butterflies;ants;spiders;owls;
frogs;snakes;horses;islands;maps;clocks;calendars;money;banks;taxes;laws;elections;schools;teachers;
universities;hospitals;doctors;dentists;airports;ships;submarines;trains;traffic;cities;villages;
architecture;paper;glass;plastic;steel;gold;diamonds;Isaac Newton;Albert Einstein;Charles Darwin;
Leonardo da Vinci;Galileo Galilei;Cleopatra;Julius Caesar;Napoleon Bonaparte;Abraham Lincoln;
Mahatma Gandhi;Nelson Mandela;Martin Luther King Jr.;Amelia Earhart;Ada Lovelace;Alan Turing;Nikola Tesla;
Thomas Edison;Florence Nightingale;Jane Austen;Charles Dickens;Mark Twain;Ludwig van Beethoven;
Wolfgang Amadeus Mozart;Vincent van Gogh;Pablo Picasso;Frida Kahlo;Confucius;Socrates;Aristotle;
Queen Victoria;Genghis Khan;Marco Polo;Christopher Columbus;Neil Armstrong;Rosa Parks;Louis Pasteur;
Sigmund Freud;Homer;Rembrandt;Johann Sebastian Bach;Japan;Brazil;India;Canada;Australia;Kenya;Norway;
Italy;Mexico;Greece;Turkey;Peru;Iceland;Vietnam;Morocco;South Korea;Spain;New Zealand;Argentina;Ireland;
Nigeria;Switzerland;Portugal;Thailand;Indonesia;Paris;London;New York City;Tokyo;Rome;Cairo;Istanbul;
Sydney;Venice;Chicago;Berlin;Singapore;Mumbai;Amsterdam;Rio de Janeiro;the Himalayas;the Alps;the Nile;
the Mississippi River;the Grand Canyon;the Pacific Ocean;the Arctic;Antarctica;the Mediterranean Sea;
Mount Everest;the Eiffel Tower;the Taj Mahal;the Statue of Liberty;Machu Picchu;the Colosseum;Stonehenge;
the Great Barrier Reef;Niagara Falls;the Dead Sea;World War I;World War II;the American Civil War;
the Industrial Revolution;the Cold War;the Middle Ages;the Black Death;the Vikings;the Aztecs;
the Inca Empire;the Ottoman Empire;the British Empire;the Mongol Empire;ancient Greece;the Ming dynasty;
the moon landing;the fall of the Berlin Wall;the Great Depression;the Gold Rush;women's suffrage;
the civil rights movement;the Declaration of Independence;the Magna Carta;the Crusades;feudalism;
the Enlightenment;the Stone Age;the Bronze Age;the abolition of slavery;the invention of the wheel;
the history of writing;the United Nations;the European Union;quantum mechanics;relativity;thermodynamics;
evolution;genetics;cells;bacteria;viruses;the periodic table;chemical reactions;acids and bases;
the immune system;the digestive system;the nervous system;the skeleton;muscles;lungs;kidneys;blood;skin;
the eye;the ear;hormones;proteins;enzymes;stem cells;cloning;ecosystems;food chains;biodiversity;
endangered species;invasive species;plate tectonics;minerals;rocks;crystals;erosion;ocean currents;
hurricanes;droughts;floods;wildfires;avalanches;snow;the seasons;the atmosphere;the ozone layer;
greenhouse gases;renewable energy;hydroelectric dams;geothermal energy;batteries;hydrogen fuel;
natural gas;oil;coal;stars;galaxies;the Milky Way;supernovas;asteroids;meteorites;eclipses;Saturn;Venus;
Neptune;Pluto;the International Space Station;telescopes;microscopes;rockets;space suits;the Big Bang;
dark matter;the speed of light;time zones;leap years;algebra;geometry;fractions;probability;statistics;
calculus;prime numbers;pi;the Pythagorean theorem;triangles;percentages;algorithms;data structures;
binary numbers;databases;operating systems;computer networks;web browsers;search engines;email;
social media;smartphones;video games;artificial intelligence;neural networks;cloud computing;
cybersecurity;passwords;encryption;blockchain;3D printing;virtual reality;drones;self-driving cars;GPS;
barcodes;Python lists;recursion;sorting;version control;spreadsheets;open source software;
software testing;the keyboard;computer viruses;depression;anxiety;stress;happiness;anger;fear;courage;
patience;honesty;gratitude;empathy;leadership;teamwork;creativity;curiosity;motivation;confidence;
critical thinking;decision making;problem solving;goal setting;procrastination;habits;perfectionism;
loneliness;forgiveness;justice;freedom;equality;human rights;privacy;ethics;philosophy;religion;Buddhism;
Islam;Christianity;Hinduism;Judaism;mythology;Greek gods;folk tales;dragons;superstitions;dreams;
language learning;reading;writing;grammar;spelling;handwriting;translation;sign language;Latin;
English idioms;essays;biographies;science fiction;fairy tales;comic books;crosswords;riddles;jokes;
storytelling;the guitar solo;opera;rock music;hip hop;folk music;classical music;drums;the flute;singing;
choirs;music festivals;dancing;hip replacement;sculpture;pottery;watercolour painting;oil painting;
drawing;calligraphy;graffiti;fashion;jewellery;interior design;furniture;carpentry;sewing;quilting;
weaving;wool;cotton;silk;leather;bread;pizza;sushi;tacos;curry;soup;salads;sandwiches;ice cream;pancakes;
eggs;milk;butter;yogurt;potatoes;tomatoes;carrots;onions;garlic;beans;lentils;nuts;peanut butter;oranges;
lemons;strawberries;grapes;mangoes;avocados;spices;cinnamon;pepper;olive oil;vinegar;wine;beer;
fruit juice;breakfast;lunch boxes;picnics;vegetarian diets;food allergies in schools;fast food;
school meals;food waste;food preservation;restaurants;barbecue;cakes;cookies;volleyball;baseball;cricket;
golf;rugby;boxing;judo;gymnastics;cycling races;rowing;sailing;surfing;diving;ice skating;ice hockey;
skateboarding;table tennis;badminton;marathons;weightlifting;climbing walls;archery;fencing;board games;
card games;puzzles;magic tricks;juggling;kites;model trains;bird watching;collecting coins;scrapbooking;
road trips;cruise ships;theme parks;zoos;aquariums;national parks;beaches;mountains;forests;caves;
waterfalls;lakes;wetlands;grasslands;tundra;deserts at night;gardens;houseplants;roses;sunflowers;cacti;
orchids;grass;weeds;compost;bees and flowers;seeds;fruit trees;tigers;bears;wolves;foxes;rabbits;deer;
giraffes;zebras;monkeys;gorillas;kangaroos;koalas;pandas;bats;mice;hedgehogs;camels;cows;pigs;sheep;goats;
chickens;ducks;eagles;parrots;hummingbirds;swans;crows;turtles;crocodiles;lizards;dolphins;octopuses;
jellyfish;crabs;salmon;goldfish;seahorses;starfish;beetles;mosquitoes;dragonflies;worms;snails;fireflies;
parenting;babies;teenagers;grandparents;marriage;siblings;neighbours;moving house;renting an apartment;
buying a house;mortgages;insurance;saving money;investing;credit cards;debt;retirement;pensions;charity;
volunteering;entrepreneurship;marketing;advertising;customer service;sales;negotiation;meetings;
presentations;resumes;interns;promotions;teamwork at work;office design;labour unions;minimum wage;
unemployment;globalization;international trade;supply chains;supply and demand;monopolies;poverty;
immigration;urban planning;public transport;buses;subways;trucks;motorcycles;airplanes;helicopters;
hot summers;roads;tunnels;canals and locks;elevators;skyscrapers;concrete;bricks;wood;rubber;aluminium;
copper;silver;iron;mirrors;lenses;lasers;light bulbs;candles;soap;toothbrushes;shoes;hats;glasses;watches;
backpacks;bags;tents;boats;wheels;screws;hammers;locks and keys;refrigerators;washing machines;ovens;
vacuum cleaners;air conditioning;toilets;first aid;flu;colds;headaches;asthma;diabetes;cancer;
heart disease;high blood pressure;back pain;broken bones;surgery;nurses;pharmacies;blood donation;
mental health;obesity;smoking;alcohol;hand washing;sunscreen;posture;stretching;walking;pets;
adopting a dog;training a puppy;aquarium fish;horse riding;police;firefighters;judges;the constitution;
presidents;parliament;kings and queens;flags;national anthems;citizenship;passports;wars;peace;armies;
spies;censorship;journalism;podcasts;fake news;homework;exams;kindergarten;online learning;scholarships;
science fairs;field trips;school uniforms;bullying;homeschooling;birthdays;weddings;holidays;Christmas;
New Year;Halloween;Thanksgiving;Easter;Diwali;Ramadan;Chinese New Year;gifts;parties;carnivals;parades;
circuses
""".replace("\n", "")
    .strip(";")
    .split(";")
)

QUESTION_FORMS: Final[tuple[str, ...]] = tuple(
    """
Explain {t} to a ten-year-old child.
Explain {t} in simple terms.
Write a short paragraph about {t}.
List five interesting facts about {t}.
What are the main benefits and drawbacks of {t}?
Give a brief history of {t}.
Write a short story that involves {t}.
Summarize what most people should know about {t}.
What are common misconceptions about {t}?
Write three questions and answers about {t}.
Why does {t} matter today?
Give me step by step advice for learning more about {t}.
Write a poem about {t}.
Compare {t} with something similar.
Write an email to a friend about {t}.
How would you describe {t} to someone from another planet?
Write a python function that prints a message about {t}.
Tell me about {t}.
What is the most important thing about {t}?
How has {t} changed over the last hundred years?
What can we learn from {t}?
Write a short dialogue between a teacher and a student about {t}.
Give me three reasons why someone might be interested in {t}.
Imagine a world without {t}. What would be different?
What questions would an expert on {t} be asked in an interview?
Write a news headline and a first paragraph about {t}.
Write an introduction for an essay about {t}.
Describe {t} using all five senses.
I have to give a two minute talk about {t}. Can you draft it?
What words are often used when people talk about {t}? Define each of them.
Make a short quiz about {t} with the answers at the end.
How does {t} affect everyday life?
What would you say to somebody who knows nothing about {t}?
Give me a beginner's guide to {t}.
Write a product description or advert inspired by {t}.
Which problems are connected with {t}, and how could they be solved?
Write a letter to a museum asking for information about {t}.
What is the science behind {t}?
Create a lesson plan about {t} for a primary school class.
Write a diary entry of a person who encounters {t} for the first time.
Please give me an outline for a report on {t}.
Are there famous people or places connected with {t}?
Write a children's story about {t} with a happy ending.
What do people often get wrong about {t}, and what is the truth?
How can I talk about {t} with my family?
What is the future of {t}?
Write a haiku about {t} and explain it.
Write a thank-you note that mentions {t}.
Can you help me understand {t}?
Who should care about {t} and why?
""".strip().split("\n")
)

HOW_TO: Final[tuple[str, ...]] = tuple(
    """
tie a tie;change a flat tyre;write a cover letter;make scrambled eggs;clean a kitchen;
plan a birthday party;learn to swim;fall asleep faster;remember people's names;start a blog;
save money on groceries;paint a room;plant tomatoes;iron a shirt;pack a suitcase;prepare for an exam;
make a good first impression;apologize to a friend;train for a 5 kilometre run;write a thank-you note;
choose a laptop;take care of a cat;bake a chocolate cake;make a paper airplane;build a bookshelf;
learn a new language;stop biting my nails;study more effectively;read more books;give a speech;
ask for a raise;remove a coffee stain;cook rice;make vegetable soup;organize my closet;
reduce my electricity bill;drink more water;improve my handwriting;meet new people in a new city;
deal with a noisy neighbour;write a short story;take better photos;wash a car;sharpen a knife;boil an egg;
set up a tent;read a map;learn to play the guitar;grow herbs indoors;protect my computer from viruses;
back up my files;create a strong password;use less plastic;walk a dog that pulls;teach a child to read;
teach a child to ride a bike;solve a quadratic equation;find the area of a circle;multiply fractions;
write a haiku;structure an essay;cite a source;take notes in class;manage stress at work;run a meeting;
say no politely;give feedback to a colleague;write a business plan;open a bank account;
plan a trip to Italy;survive a long flight;stay warm in winter;stay cool in summer;treat a small burn;
stop a nosebleed;make lemonade;make pizza dough;roast vegetables;cook for one person;start running;
do a push-up;stretch before exercise;clean a bathroom;fold a fitted sheet;choose a birthday gift;
write a wedding toast;comfort a sad friend;make a budget;plan meals for a week;learn to draw;
repair a bicycle chain;hang a picture;keep houseplants alive;choose ripe fruit;store potatoes;
clean windows;speak with confidence
""".replace("\n", "").split(";")
)
HOW_TO_FORMS: Final[tuple[str, ...]] = (
    "How do I {t}?",
    "Give me step by step instructions to {t}.",
    "What is the best way to {t}?",
    "I want to {t} but I do not know where to start. Can you help?",
    "Explain to a beginner how to {t}.",
    "What mistakes should I avoid when I {t}?",
    "Give me five tips to {t}.",
    "Write a short checklist for someone who wants to {t}.",
)

CODE: Final[tuple[str, ...]] = tuple(
    """
reverses a string;checks whether a number is prime;computes the factorial of a number;
returns the nth Fibonacci number;counts the vowels in a text;finds the largest number in a list;
sorts a list of numbers;checks whether a word is a palindrome;removes duplicates from a list;
counts how often each word occurs in a text;converts Celsius to Fahrenheit;computes the average of a list;
reads a file and prints its lines;merges two dictionaries;finds the greatest common divisor;
checks whether a year is a leap year;flattens a nested list;generates a random password;
prints a multiplication table;computes the area of a circle;sums the digits of a number;
converts a number to binary;swaps two variables;finds the second largest number in a list;
checks whether two words are anagrams;capitalizes every word in a sentence;counts down from ten;
splits a list into chunks;finds the longest word in a sentence;simulates rolling two dice;
computes compound interest;validates an email address;reads a CSV file;writes a list to a JSON file;
implements a stack;implements a queue;implements binary search;implements bubble sort;
plays rock, paper, scissors;guesses a number between 1 and 100;draws a triangle of stars;
removes punctuation from a text;checks whether a list is sorted;rotates a list by k places;
computes the power of a number without using the ** operator;transposes a matrix
""".replace("\n", "").split(";")
)
CODE_FORMS: Final[tuple[str, ...]] = (
    "Write a Python function that {t}.",
    "Write a Python program that {t} and explain how it works.",
    "Write a JavaScript function that {t}.",
    "How can I write a function in Python that {t}? Add comments.",
    "Write a C program that {t}.",
    "Show me a short Python script that {t}, with an example of its use.",
)

OPEN: Final[tuple[str, ...]] = tuple(
    """
What is the capital of France?;How do airplanes fly?;Why is the sky blue?;Why is the sea salty?;
Why do leaves change colour?;Why do we yawn?;Why do cats purr?;How do magnets work?;
How does a microwave oven heat food?;What is the meaning of life?;Who wrote Romeo and Juliet?;
What is the largest ocean?;How far away is the moon?;What causes tides?;How do vaccines work?;
What is the difference between weather and climate?;
What is the difference between a virus and a bacterium?;
What is the difference between a simile and a metaphor?;
What is the difference between speed and velocity?;
What is the difference between a crocodile and an alligator?;
What is the difference between RAM and storage?;Translate 'good morning' into Spanish and French.;
How do you say 'thank you' in five languages?;
Give me three synonyms for 'happy' and use each in a sentence.;Give me three antonyms for 'brave'.;
Suggest a name for a coffee shop.;Suggest five names for a small dog.;Suggest a slogan for a bakery.;
Recommend three activities for a rainy day.;Recommend a healthy snack.;Plan a weekend in Paris.;
Plan a day at the beach.;Plan a three day trip to Rome.;Write a recipe for vegetable soup.;
Write a recipe for pancakes.;Write a recipe for a fruit salad.;Write a recipe for tomato sauce.;
Tell me a joke.;Tell me a riddle and its answer.;Tell me a fun fact.;Tell me a bedtime story.;
Write a limerick.;Write a haiku about autumn.;Write a love poem.;Write a motivational quote.;
Write a short speech for a wedding.;Write a short speech for a retirement party.;
Write a resignation letter.;Write a letter of recommendation for a student.;
Write an email to my boss asking for a day off.;
Write an email to a customer apologizing for a late delivery.;
Write an email to a teacher explaining why my homework is late.;
Write an invitation to a housewarming party.;Write a complaint about a broken phone.;
Write a review of a restaurant.;Write a review of a book you like.;Write a job advert for a gardener.;
Write a job description for a software engineer.;Write a bio for a photographer.;
Write a social media post about a new bakery.;Write a text message to cancel dinner politely.;
I feel tired all the time. What should I do?;I am nervous about my first day at work. Any advice?;
I lost my keys. What now?;My friend is angry with me. What can I say?;
My computer is slow. How can I make it faster?;My plant has yellow leaves. Why?;
I cannot decide between two jobs. How do I choose?;
I want to learn programming. Which language should I start with?;
I have 20 euros for dinner for four people. What can I cook?;What should I wear to a job interview?;
What should I see in London?;What should I pack for a week in the mountains?;
What are the planets of the solar system?;What are the primary colours?;What are the five senses?;
What are the states of matter?;What are the parts of a plant?;What are the parts of speech?;
What are the continents?;What are the stages of grief?;What are the symptoms of a cold?;
Name ten countries in Europe.;Name five programming languages and what they are used for.;
Name three famous paintings.;Name five inventions that changed the world.;
How many days are there in a leap year?;How many bones does a human have?;How old is the universe?;
How is glass made?;How is chocolate made?;How is paper recycled?;How does a bill become a law?;
How does the heart pump blood?;How does a car engine work?;How does Wi-Fi work?;
How do plants drink water?;How do birds migrate?;How do fish breathe?;How do we see colours?;
How do computers store numbers?;How does money get its value?;Should children have smartphones?;
Should homework be banned?;Is it better to live in a city or in the countryside?;
Is it better to rent or to buy a home?;Are zoos a good thing?;Can money buy happiness?;Do aliens exist?;
Can animals think?;What would happen if the Earth stopped spinning?;
What would happen if bees disappeared?;What makes a good friend?;What makes a good leader?;
What makes a good story?;What is love?;What is time?;What is art?;What is an atom made of?;
What is your name?;Who are you?;What can you do?;Hello!;Hi, how are you?;Good evening, I need some help.;
Thank you!
""".replace("\n", "").split(";")
)

SCENES: Final[tuple[str, ...]] = tuple(
    """
a lost dog who finds its way home;a robot who learns to paint;two friends who open a bakery;
a girl who talks to the wind;an old sailor and his last voyage;a boy who finds a door in a tree;
a dragon who is afraid of fire;a detective in a small town;a teacher on her first day;
a family that moves to the mountains;a cat who rules a kingdom;an astronaut alone on a ship;
a musician who loses her voice;a gardener with a secret;a train that never stops;a king who cannot sleep;
a child who builds a time machine;a farmer and a clever fox;a letter that arrives fifty years late;
a storm on an island;a clockmaker who can stop time;a shy ghost in a library;a baker who solves crimes;
two brothers and a magic map;a scientist who shrinks herself;a bear who wants to dance;
a painter who paints the future;a small town without colours
""".replace("\n", "").split(";")
)
SCENE_FORMS: Final[tuple[str, ...]] = (
    "Write a short story about {t}.",
    "Write the opening paragraph of a novel about {t}.",
    "Write a poem about {t}.",
    "Tell me a bedtime story about {t}.",
    "Write a short scene with dialogue about {t}.",
    "Write a plot summary for a film about {t}.",
)

SENTENCES: Final[tuple[str, ...]] = (
    "The meeting was moved to Thursday because the manager is travelling and several people asked "
    "for more time to prepare.",
    "Our shop sells fresh bread, cakes and coffee, and it has been owned by the same family for more than sixty years.",
    "Many people believe that reading before bed helps them to sleep, although bright screens may "
    "have the opposite effect.",
    "The river flooded the lower part of the town, and volunteers worked through the night to help "
    "families leave their homes.",
    "Scientists have found a new kind of frog in the rainforest that is smaller than a fingernail "
    "and sings before sunrise.",
    "She studied engineering for four years, worked in three countries, and then decided to open a "
    "school for young inventors.",
    "The company plans to build a factory near the harbour, which would create two hundred jobs but "
    "also bring more traffic.",
    "Last summer we walked along the coast for ten days, slept in small guest houses and ate fish "
    "almost every evening.",
    "Electric buses are quiet and clean, but they are expensive and need charging stations in many parts of the city.",
    "The old theatre will be closed for a year while workers repair the roof, the stage and the broken heating system.",
    "Children who play outside every day tend to sleep better, move more confidently and get along well with others.",
    "The recipe needs two eggs, a cup of flour, some milk and a pinch of salt, and it takes about "
    "twenty minutes to make.",
    "Honestly the service was slow, the soup was cold, and nobody apologized, so we will probably not come back.",
    "The museum offers free entry on Sundays, guided tours in five languages and a workshop where "
    "visitors can try printing.",
    "Because the harvest was poor this year, the price of apples has doubled and some farmers fear for their future.",
    "He forgot his umbrella, missed the bus and arrived late, but the interview went surprisingly well in the end.",
)
SENTENCE_FORMS: Final[tuple[str, ...]] = (
    "Summarize this text in one sentence: {t}",
    "Rewrite this text in simpler words: {t}",
    "Rewrite this text in a more formal style: {t}",
    "Continue this text: {t}",
    "Write three questions that this text answers: {t}",
    "Make this text longer and more vivid: {t}",
    "What is the main idea of this text? {t}",
    "Turn this text into a list of bullet points: {t}",
)

FOLLOW_UPS: Final[tuple[str, ...]] = tuple(
    """
Can you give me an example?
Please make that shorter.
Explain the last point in more detail.
Why is that?
Can you say that in simpler words?
What should I do next?
Are there any exceptions?
Can you turn this into a list?
What is the most important part?
Thank you. What else should I know?
How would you explain this to a child?
Can you write a short summary of what you just said?
""".strip().split("\n")
)

SYSTEMS: Final[tuple[str, ...]] = (
    "You are a helpful assistant.",
    "You are a friendly teacher who explains things clearly.",
    "You are a concise assistant. Answer briefly.",
    "You are an experienced writer and editor.",
)


def _sums(rng: random.Random, count: int) -> list[str]:
    names = ["Anna", "Tom", "Maria", "Ben", "Lucy", "Omar", "Nina", "Paul"]
    things = ["apples", "books", "marbles", "stickers", "coins", "pencils", "cookies", "tickets"]
    made = []
    for _ in range(count):
        a, b, c = rng.randint(3, 60), rng.randint(2, 30), rng.randint(2, 9)
        name, other, thing = *rng.sample(names, 2), rng.choice(things)
        made.append(
            rng.choice(
                [
                    f"What is {a} plus {b}?",
                    f"What is {a} times {c}? Explain your reasoning.",
                    f"{name} has {a + b} {thing} and gives {b} to {other}. How many {thing} are left?",
                    f"{name} buys {c} boxes with {a} {thing} in each. How many {thing} does {name} have?",
                    f"A train travels {a * c} kilometres in {c} hours. What is its average speed?",
                    f"A rectangle is {a} metres long and {b} metres wide. What are its area and its perimeter?",
                    f"What is {c * 5} percent of {a * 10}?",
                    f"Solve for x: {c}x + {b} = {a + b}.",
                    f"{name} saves {a} dollars a week. How much does {name} have after {c} weeks?",
                    f"Share {a * c} {thing} equally among {c} children. How many does each child get?",
                ]
            )
        )
    return made


def _filled(forms: Sequence[str], fillings: Sequence[str]) -> list[str]:
    return [form.format(t=filling) for form in forms for filling in fillings]


def _with_systems(rng: random.Random, questions: Sequence[str]) -> list[Conversation]:
    # Four in five chats carry the template's own system line, because that is what a chat server renders;
    # the others keep the draft from depending on it.
    return [Conversation(rng.choice(SYSTEMS) if rng.random() < 0.2 else None, question) for question in questions]


def _written(name: str) -> list[Conversation]:
    lines = (pathlib.Path(__file__).parent / name).read_text().splitlines()
    return [Conversation(None, line) for line in lines]


def questions() -> list[Conversation]:
    """Return the training questions of ``questions.txt``, whose order is random already.

    Returns:
        Conversations without duplicates, all with the template's own system line.
    """
    return _written("questions.txt")


def validation() -> list[Conversation]:
    """Return questions about topics that training never names; they choose the checkpoint.

    Returns:
        Five conversations on each of twelve topics.
    """
    return _written("questions_validation.txt")


def forms(seed: int = 0, forms_per_topic: int = 8) -> list[Conversation]:
    """Return the filled forms in the order in which they are to be answered.

    The order is shuffled, so any prefix of the list covers topics and question forms evenly and generation
    may stop anywhere.

    Args:
        seed: seed of the choice of forms, of the sums and of the order.
        forms_per_topic: question forms drawn for each topic.

    Returns:
        Conversations without duplicates.
    """
    rng = random.Random(seed)
    filled = [form.format(t=topic) for topic in TOPICS for form in rng.sample(QUESTION_FORMS, forms_per_topic)]
    filled += rng.sample(_filled(HOW_TO_FORMS, HOW_TO), 320)
    filled += rng.sample(_filled(CODE_FORMS, CODE), 170)
    filled += rng.sample(_filled(SCENE_FORMS, SCENES), 100)
    filled += rng.sample(_filled(SENTENCE_FORMS, SENTENCES), 90)
    filled += OPEN
    filled += _sums(rng, 160)
    filled = list(dict.fromkeys(filled))
    rng.shuffle(filled)
    return _with_systems(rng, filled)
